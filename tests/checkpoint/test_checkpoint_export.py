"""Plain parameters for other tools, taken from a checkpoint without its model."""

import dataclasses
import json
import shutil
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from spmdkit.checkpoint import Checkpoints, export
from spmdkit.checkpoint.lazy_array import LazyArray
from spmdkit.checkpoint.weights import open_weights
from spmdkit.errors import CheckpointError, CheckpointWriteError, ConfigError
from spmdkit.foundation.trees import named_leaves
from tests.support.checkpoint_states import bits, mesh_of, place, train_state

safetensors = pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Steps 1 and 2, sharded over eight devices."""
    directory = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(directory)
    made = lambda seed: dataclasses.replace(train_state(seed), model_state={"mean": jnp.arange(4.0) + seed})
    states = {step: place(made(step), mesh_of(8)) for step in (1, 2)}
    for step, state in states.items():
        checkpoints.save(step, state, {})
    checkpoints.close()
    return directory, states


@pytest.fixture
def saved(original, directory):
    shutil.copytree(original[0], directory)
    return original[1]


def read_safetensors(path):
    with safetensors.safe_open(path, framework="flax") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.mark.parametrize(("step", "what"), [(None, "params"), (1, "ema")])
def test_safetensors_holds_every_parameter_bitwise(saved, directory, tmp_path, step, what):
    out = tmp_path / "new" / "model.safetensors"
    assert export(directory, step, out, what=[what]) == (step or 2)
    arrays, metadata = read_safetensors(out)
    assert metadata == {"step": str(step or 2), "what": what}
    want = dict(named_leaves(getattr(saved[step or 2], what)))
    assert arrays.keys() == want.keys() and "blocks/0/kernel" in arrays
    for name, array in arrays.items():
        assert (array.dtype, array.shape, bits(array)) == (want[name].dtype, want[name].shape, bits(want[name])), name
    assert [path.name for path in out.parent.iterdir()] == ["model.safetensors"]


def test_a_large_export_is_several_files_and_an_index(saved, directory, tmp_path, monkeypatch):
    arrays, read = list[weakref.ref](), LazyArray.read

    def read_alone(self, *index):
        assert all(array() is None for array in arrays), "two arrays are in memory"
        arrays.append(weakref.ref(array := read(self, *index)))
        return array

    monkeypatch.setattr(LazyArray, "read", read_alone)
    out = tmp_path / "model.safetensors"
    what = ["params", "model_state", "ema"]
    export(directory, 1, out, what=what, max_shard_size="1KB")
    monkeypatch.undo()
    files = sorted(path.name for path in tmp_path.iterdir() if path != directory)
    num = len(files) - 1
    names = [f"model-{i:05d}-of-{num:05d}.safetensors" for i in range(1, num + 1)]
    assert num > 2 and files == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / files[-1]).read_text())
    read_back = {}
    for name in names:
        read_back |= (of_file := read_safetensors(tmp_path / name)[0])
        assert of_file.keys() == {key for key, holder in index["weight_map"].items() if holder == name}
        assert len(of_file) == 1 or sum(x.nbytes for x in of_file.values()) <= 1000
    want = {f"{part}/{path}": x for part in what for path, x in named_leaves(getattr(saved[1], part))}
    assert read_back.keys() == want.keys()
    assert all(bits(x) == bits(want[name]) and x.dtype == want[name].dtype for name, x in read_back.items())
    assert index["metadata"] == {"total_size": sum(x.nbytes for x in want.values())}
    with open_weights(tmp_path / files[-1]) as weights:  # as init_from
        assert {name: bits(weights(name).read()) for name in weights.names} == {k: bits(x) for k, x in want.items()}
    with pytest.raises(ConfigError, match=r"index\.json: it exists"):
        export(directory, 1, out)


@pytest.mark.parametrize("size", ["5", "GB", "0GB", "5 gb"])
def test_a_size_without_a_number_or_unit_is_refused(saved, directory, tmp_path, size):
    with pytest.raises(ConfigError, match=f"max_shard_size '{size}' is no size. .*5GB"):
        export(directory, None, tmp_path / "out", max_shard_size=size)


def test_an_orbax_export_opens_with_plain_orbax(saved, directory, tmp_path):
    out = tmp_path / "plain"
    export(directory, None, out, "orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(out)
    want = saved[2].params
    for name, array in restored["blocks"]["0"].items():
        assert array.dtype == want["blocks"][0][name].dtype
        assert bits(array) == bits(want["blocks"][0][name])
    assert bits(restored["table"]) == bits(want["table"])


def test_parameters_that_are_one_array_are_exported(directory, tmp_path):
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, {"params": jnp.arange(3.0), "paramsx": jnp.ones(1)}, {})
    checkpoints.close()
    export(directory, 1, tmp_path / "one")
    arrays, _ = read_safetensors(tmp_path / "one")
    assert arrays.keys() == {"params"} and np.array_equal(arrays["params"], [0, 1, 2])


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_unwritable_export_is_a_write_error(saved, directory, tmp_path, format):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointWriteError, match=r"export to .*failed"):
        export(directory, None, tmp_path / "file" / "out", format)


@pytest.mark.parametrize(("format", "what", "word"), [("safetensor", "params", "safetensors"), ("orbax", "em", "ema")])
def test_an_unknown_choice_names_the_nearest(saved, directory, tmp_path, format, what, word):
    with pytest.raises(ConfigError, match=f"Did you mean '{word}'"):
        export(directory, None, tmp_path / "out", format, [what])


def test_what_is_not_there_is_a_checkpoint_error(directory, tmp_path):
    with pytest.raises(CheckpointError, match="holds none"):
        export(directory, None, tmp_path / "out")
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, {"params": {"w": jnp.ones(1), "key": jax.random.key(0)}}, {})
    checkpoints.close()
    with pytest.raises(CheckpointError, match=r"holds params, no ema. Set ema in the config"):
        export(directory, 1, tmp_path / "out", what=["ema"])
    with pytest.raises(CheckpointError, match=r"step 5 is requested, but .* has steps 1"):
        export(directory, 5, tmp_path / "out")
    with pytest.raises(CheckpointError, match="`params/key` is a random key"):
        export(directory, 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dtype_that_safetensors_lacks_is_named(directory, tmp_path):
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, {"params": {"w": jnp.ones(4, jnp.int4)}}, {})
    checkpoints.close()
    with pytest.raises(ConfigError, match=r"int4.*Export with format orbax"):
        export(directory, 1, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [directory]


@pytest.mark.parametrize(("format", "target"), [("safetensors", "file"), ("orbax", "folder"), ("orbax", "nothing")])
def test_export_over_a_link_is_refused(saved, directory, tmp_path, format, target):
    mine, out = tmp_path / "mine", tmp_path / "out"
    if target == "file":
        mine.write_text("precious")
    elif target == "folder":
        mine.mkdir()
        (mine / "notes").write_text("precious")
    out.symlink_to(mine)
    with pytest.raises(ConfigError, match=r"export to .*out: it exists\. Nothing is overwritten"):
        export(directory, None, out, format)
    assert out.is_symlink() and mine.exists() == (target != "nothing")
    if target != "nothing":
        assert (mine if target == "file" else mine / "notes").read_text() == "precious"
