"""A state before step 1 that is read from weights: equal to a plain loader on every mesh, without a constant."""

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import spmdkit as sk
from spmdkit.checkpoint import Checkpoints
from spmdkit.errors import CheckpointError, ConfigError
from spmdkit.foundation.trees import named_leaves
from tests.support.core_runs import program_of
from tests.support.own_files import config_by_choice

st = pytest.importorskip("safetensors.numpy")

MESHES = {"one device": {}, "data 4": {"data": 4}, "fsdp 4": {"fsdp": 4}, "data 2 x tensor 2": {"data": 2, "tensor": 2}}
D, F, LAYERS = 8, 16, 3
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(32, D)).astype(np.float32)
TABLE = DRAW.normal(size=(2000, D)).astype(np.float32)  # 64 kB that must not become a constant


def init(key):
    keys = jax.random.split(key, 3)
    up, down = jax.random.normal(keys[0], (LAYERS, D, F)), jax.random.normal(keys[1], (LAYERS, F, D))
    head = jax.random.normal(keys[2], (D, 2))
    return {"table": jnp.asarray(TABLE), "blocks": {"up": up, "down": down}, "head": {"w": head}}


def loss_fn(params, batch, key):
    x = batch["x"] + params["table"][:1]
    for i in range(LAYERS):
        x = x + jnp.tanh(x @ params["blocks"]["up"][i]) @ params["blocks"]["down"][i]
    return sk.mean(((x @ params["head"]["w"]) ** 2).sum(-1))


def task(**changes):
    rules = [("blocks/up", [None, None, "mlp"]), ("blocks/down", [None, "mlp", None])]
    data = {"x": X}
    return sk.Task(init, loss_fn, optax.adam(1e-2), train_data=data, eval_data=data, rules=rules, **changes)


SHAPES = jax.eval_shape(init, jax.random.key(0))
PARAMS = {path: DRAW.normal(size=x.shape).astype(np.float32) for path, x in named_leaves(SHAPES)}
TORCH = {"wte.weight": PARAMS["table"], "lm_head.weight": np.ascontiguousarray(PARAMS["head/w"].T)}
for i in range(LAYERS):
    TORCH[f"h.{i}.up.weight"] = np.ascontiguousarray(PARAMS["blocks/up"][i].T)
    TORCH[f"h.{i}.down.weight"] = PARAMS["blocks/down"][i]
FROM_TORCH = """
import spmdkit as sk
@sk.weights
def load(read, layers=3):
    yield "table", read("wte.weight")
    yield "head/w", read("lm_head.weight").T
    yield "blocks/down", read.stack("h.{}.down.weight", layers)
    yield "blocks/up", read.stack([read(f"h.{i}.up.weight").T for i in range(layers)])
@sk.weights
def wrong(read):
    yield "table", read("wte.wight")
@sk.weights
def elsewhere(read):
    yield "blocks/gate", read("wte.weight")
@sk.weights
def not_pairs(read):
    yield read("wte.weight")
def unregistered(read):
    return []
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights in every form: one file, an index of two, names of torch, a run with steps 1 and 2, plain orbax."""
    folder = tmp_path_factory.mktemp("weights")
    st.save_file(PARAMS, folder / "model.safetensors")
    st.save_file(TORCH, folder / "torch.safetensors")
    halves = {name: list(TORCH)[i::2] for i, name in enumerate(("a.safetensors", "b.safetensors"))}
    for file, names in halves.items():
        st.save_file({name: TORCH[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    program = program_of(task(), mesh={"fsdp": 4}, ema=0.5)
    state = program.init()
    state = state.replace(opt_state=jax.tree.map(lambda x: x + 3, state.opt_state))
    with_params = lambda scale: state.replace(params=place(scale, state.params), ema=place(2 * scale, state.ema))
    checkpoints = Checkpoints(folder / "run" / "checkpoints")
    for step, scale in ((1, 1.0), (2, 5.0)):
        checkpoints.save(step, with_params(scale), {}, {"loss": float(step)})
    checkpoints.close()
    with ocp.StandardCheckpointer() as checkpointer:
        nested = {"table": PARAMS["table"], "head": {"w": PARAMS["head/w"]}}
        nested["blocks"] = {name: PARAMS[f"blocks/{name}"] for name in ("up", "down")}
        checkpointer.save(folder / "plain" / "7" / "default", {"params": nested, "step": np.int32(5)})
    (folder / "convert.py").write_text(FROM_TORCH)
    return folder


def place(scale, like):
    put = lambda path, x: jax.device_put(scale * PARAMS["/".join(key.key for key in path)], x.sharding)
    return jax.tree.map_with_path(put, like)


def opened(init_from, mesh="one device", given=None, **settings):
    if isinstance(init_from, dict) and isinstance(init_from.get("names"), list):
        init_from = init_from | {"names": [tuple(rule) for rule in init_from["names"]]}
    return program_of(given or task(), mesh=MESHES[mesh], init_from=init_from, **settings)


def equal(params, scale=1.0):
    return all(np.array_equal(jax.device_get(x), scale * PARAMS[path]) for path, x in named_leaves(params))


FORMS = {
    "safetensors": ("model.safetensors", {}),
    "run": ("run@1", {}),
    "plain orbax": ("plain", {}),
    "step of plain orbax": ("plain@7", {}),
    "folder of plain orbax": ("plain/7/default", {}),
}


@pytest.mark.forms(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_warm_start_trains_as_from_a_plain_loader(folder, mesh):
    program = opened(str(folder / "model.safetensors"), mesh)
    state, other = program.init(), program_of(task(), mesh=MESHES[mesh])
    plain = other.init()
    expected = other.optimizer.init(place(1.0, plain.params))
    assert equal(state.params) and state.step == 0
    for (path, x), y in zip(named_leaves(state.opt_state), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(x, y), path
    assert jax.tree.map(lambda x: x.sharding, state) == program.state_sharding
    plain = plain.replace(params=place(1.0, plain.params))
    for _, batch in program.batches(stop=3):
        state, metrics = program.step(state, batch)
        plain, same = other.step(plain, batch)
    assert metrics["loss"] == same["loss"]
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_every_source_gives_the_parameters(folder, form):
    name, more = FORMS[form]
    key = "file" if name.endswith("safetensors") else "path"
    assert equal(opened({key: str(folder / name), **more}, "fsdp 4").init().params)


def test_a_run_is_read_at_its_newest_step(folder):
    assert equal(opened(str(folder / "run")).init().params, 5.0)
    assert equal(opened(str(folder / "run" / "checkpoints" / "1")).init().params)


@pytest.mark.parametrize("mesh", ["one device", "data 2 x tensor 2"])
@pytest.mark.parametrize("file", ["torch.safetensors", "model.safetensors.index.json"])
def test_a_function_transposes_and_stacks(folder, monkeypatch, file, mesh):
    lines = "task: x.py:t\nbatch_size: 8\n"
    load = config_by_choice(folder, monkeypatch, {"convert.py": FROM_TORCH}, lines, "init_from")
    config = load(f"{{file: {file}, names: {{convert.py:load: {{layers: 3}}}}}}")
    program = opened(config.init_from, mesh)
    program.config = config  # relative to its folder
    assert equal(program.init().params)


def test_parts_of_a_run(folder):
    path = str(folder / "run@1")
    state = opened({"path": path, "what": ["params", "opt_state"]}, "fsdp 4").init()
    assert equal(state.params) and state.step == 0 and state.opt_state[0].count == 3
    averaged = opened({"path": path, "what": ["ema"]}, ema=0.5).init()
    assert equal(averaged.params, 2.0) and equal(averaged.ema, 2.0)


@pytest.mark.parametrize("mesh", ["data 4", "fsdp 4"])
def test_without_strict_init_makes_the_rest(folder, mesh):
    given = {"file": str(folder / "model.safetensors"), "names": [["table|head.*", None]], "strict": False}
    program = opened(given, mesh)
    state, fresh = program.init(), program_of(task(), mesh=MESHES[mesh]).init()
    for path, x in named_leaves(state.params):
        if path.startswith("blocks"):
            assert np.array_equal(x, PARAMS[path]), path
        else:
            assert np.array_equal(x, dict(named_leaves(fresh.params))[path]), path
    assert any("initialized by init: head/w, table" in note for note in program.init_from.notes)


def test_groups_and_model_state_are_loaded(folder, tmp_path):
    def stateful(params, state, batch, key):
        return loss_fn(params, batch, key), {}, {"mean": 0.9 * state["mean"] + 0.1 * batch["x"].mean()}

    stateful_init = lambda key: sk.Variables(init(key), {"mean": jnp.zeros(())})
    given = sk.Task(stateful_init, stateful, optax.sgd(0.1), train_data={"x": X})
    st.save_file({**PARAMS, "model_state.mean": np.float32([3.0]).reshape(())}, tmp_path / "m.safetensors")
    options = {"file": str(tmp_path / "m.safetensors"), "what": ["params", "model_state"]}
    state = opened(options, "data 4", given, sync={"local_sgd": {"every": 2}}, batch_size=16, ema=0.9).init()
    up = np.stack([PARAMS["blocks/up"]] * 4)
    assert np.array_equal(state.params["blocks"]["up"], up) and np.array_equal(state.ema["blocks"]["up"], up)
    assert np.array_equal(state.model_state["mean"], [3.0] * 4)


def test_nothing_becomes_a_constant(folder):
    plain, warm = program_of(task()).initial.lowered.as_text(), opened(str(folder / "model.safetensors"), "fsdp 4")
    assert len(plain) > 4 * TABLE.size  # as a constant of the program
    assert len(warm.initial.lowered.as_text()) < 16_000
    assert "threefry" in plain and "threefry" not in warm.initial.lowered.as_text()


def test_leaves_of_the_initial_state_read_only_theirs(folder, monkeypatch):
    program = opened(str(folder / "model.safetensors"), "fsdp 4")
    read = []
    original = program.init_from.read
    monkeypatch.setattr(program.init_from, "read", lambda targets: read.extend(targets) or original(targets))
    leaves = program.initial.leaves({"params/head/w", "opt_state/0/mu/table"})
    assert read == ["params/head/w"] and np.array_equal(leaves["params/head/w"], PARAMS["head/w"])
    assert not leaves["opt_state/0/mu/table"].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_another_float_dtype_is_converted_with_a_line(tmp_path, dtype):
    as_saved = {path: x.astype(jnp.dtype(dtype)) for path, x in PARAMS.items()}
    st.save_file(as_saved, tmp_path / "m.safetensors")
    program = opened(str(tmp_path / "m.safetensors"), "fsdp 4")
    state = program.init()
    for path, x in named_leaves(state.params):
        assert x.dtype == jnp.float32 and np.array_equal(x, as_saved[path].astype(np.float32)), path
    [note] = [note for note in program.init_from.notes if "converted" in note]
    assert f"{dtype} to float32" in note


def test_the_dtype_of_the_file_is_retained(tmp_path):
    as_saved = {path: x.astype(ml_dtypes.bfloat16) for path, x in PARAMS.items()}
    st.save_file(as_saved, tmp_path / "m.safetensors")
    program = opened(str(tmp_path / "m.safetensors"), precision={"params": "bfloat16", "compute": "bfloat16"})
    assert all(np.array_equal(x, as_saved[path]) for path, x in named_leaves(program.init().params))
    assert not any("converted" in note for note in program.init_from.notes)


def changed(folder, changes):
    st.save_file({path: x for path, x in {**PARAMS, **changes}.items() if x is not None}, folder / "m.safetensors")
    return {"file": str(folder / "m.safetensors")}


WRONG = {
    "no such file": (lambda d: {"file": str(d / "modle.safetensors")}, ConfigError, "modle.safetensors does not exist"),
    "no such folder": (lambda d: str(d / "nowhere"), ConfigError, "nowhere does not exist"),
    "not a run": (lambda d: str(d), CheckpointError, "holds none"),
    "wrong shape": (
        lambda d: changed(d, {"blocks/up": PARAMS["blocks/up"].T.copy()}),
        ConfigError,
        r"blocks/up: expected float32\[3,8,16\], found blocks/up float32\[16,8,3\] \(transposed\?\)",
    ),
    "wrong dtype": (
        lambda d: changed(d, {"head/w": np.zeros((D, 2), np.int32)}),
        ConfigError,
        r"head/w: expected float32\[8,2\], found head/w int32\[8,2\]",
    ),
    "not found": (lambda d: changed(d, {"table": None}), ConfigError, r"table: expected float32\[2000,8\], not found"),
    "no leaf": (
        lambda d: changed(d, {"tabel": np.zeros(3)}),
        ConfigError,
        r"tabel float64\[3\] is no leaf. Did you mean 'table'",
    ),
    "pattern without a match": (
        lambda d: changed(d, {}) | {"names": [[r"h\.(\d+)", r"blocks/\1"]]},
        ConfigError,
        r"names\[0\]: pattern .* matches no name",
    ),
    "two names": (
        lambda d: changed(d, {"other": PARAMS["table"]}) | {"names": [["other", "table"]]},
        ConfigError,
        "table: two arrays, (other and table|table and other)",
    ),
    "group of no pattern": (
        lambda d: changed(d, {}) | {"names": [["table", r"\1"]]},
        ConfigError,
        "is no replacement of the pattern",
    ),
    "nothing fits": (
        lambda d: {"file": changed(d, {})["file"], "names": [[".*", None]], "strict": False},
        ConfigError,
        "none of its 4 arrays",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_source_is_one_message(tmp_path, case):
    make, kind, words = WRONG[case]
    with pytest.raises(kind) as error:
        opened(make(tmp_path)).init()
    assert re.search(words, str(error.value)), error.value


def test_a_truncated_file_is_damaged(folder, tmp_path):
    (tmp_path / "m.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="is not a complete safetensors file"):
        opened(str(tmp_path / "m.safetensors")).init()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("wrong", "has no array 'wte.wight'.*Did you mean 'wte.weight'"),
        ("elsewhere", r"wte.weight float32\[2000,8\], named 'blocks/gate', is no leaf"),
        ("not_pairs", "yields pairs of a path and an array"),
        ("unregistered", "@sk.weights"),
        ("missing", "has no 'missing'"),
    ],
)
def test_a_wrong_function_is_one_message(folder, monkeypatch, names, words):
    load = config_by_choice(folder, monkeypatch, {"convert.py": FROM_TORCH}, "task: x.py:t\n", "init_from")
    program = opened(str(folder / "torch.safetensors"))
    program.config = load(f"{{file: torch.safetensors, names: convert.py:{names}, strict: false}}")
    with pytest.raises(ConfigError) as error:
        program.init()
    assert re.search(words, str(error.value), re.S), error.value
