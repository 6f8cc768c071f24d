"""Each file of a checkpoint, cut short, emptied or deleted, is found out or does no harm."""

import json
import shutil

import jax
import pytest

from spmdkit.checkpoint import Checkpoints, export, ls
from spmdkit.errors import CheckpointError
from tests.support.checkpoint_states import abstract_on, assert_same, mesh_of, place, train_state


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory, state = tmp_path_factory.mktemp("saved"), place(train_state(), mesh_of(8))
    checkpoints = Checkpoints(directory)
    for step in (20, 40):
        checkpoints.save(step, state, {"seed": 1})
    checkpoints.close()
    return directory, state


@pytest.fixture
def saved(original, directory):
    """Two steps of one state, the second to be damaged."""
    shutil.copytree(original[0], directory)
    checkpoints = Checkpoints(directory)
    yield checkpoints, original[1]
    checkpoints.close()


def cut_one_byte(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def delete(path):
    path.unlink()


def grow(path):
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("damage", [cut_one_byte, delete, grow])
def test_every_damaged_file_is_detected_or_harmless(saved, directory, tmp_path, damage):
    checkpoints, state = saved
    whole = tmp_path / "whole"
    shutil.copytree(directory / "40", whole)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    assert len(files) > 8
    harmless = []
    for name in files:
        shutil.rmtree(directory / "40")
        shutil.copytree(whole, directory / "40")
        damage(directory / "40" / name)
        try:
            restored, _ = checkpoints.restore(40, abstract_on(state, mesh_of(4)))
        except CheckpointError as error:
            assert str(directory / "40") in str(error) or "has steps 20" in str(error), (name, error)
            assert "to return to step 20" in str(error) or "Request step 20" in str(error), (name, error)
            assert "\n" not in str(error)
        else:
            assert_same(restored, state)
            harmless.append(str(name))
    # Only orbax's own stamps, which it writes after our record, and a byte after the record's end, may be touched.
    assert set(harmless) <= {"_CHECKPOINT_METADATA", "commit_success.txt"} | (
        {"record.json"} if damage is grow else set()
    )


def test_damaged_step_is_still_the_latest(saved, directory):
    checkpoints, _ = saved
    empty(directory / "40" / "record.json")
    assert checkpoints.latest() == 40
    rows = ls(directory)
    assert [row["complete"] for row in rows] == [True, False]
    assert "record.json cannot be read" in rows[1]["problem"]


def test_damaged_only_step_names_no_earlier_one(saved, directory):
    checkpoints, state = saved
    shutil.rmtree(directory / "20")
    delete(next((directory / "40").rglob("manifest.ocdbt")))
    with pytest.raises(CheckpointError, match=r"manifest.ocdbt is missing .*there is no earlier step"):
        checkpoints.restore(40, abstract_on(state, mesh_of(1)))


def overwrite(path):
    path.write_bytes(bytes(255 - byte for byte in path.read_bytes()))


def test_garbage_of_the_right_size_gives_damaged_error(saved, directory):
    checkpoints, state = saved
    for path in (directory / "40" / "state").rglob("*"):
        if path.is_file():
            overwrite(path)
    with pytest.raises(CheckpointError, match=r"40 is damaged: .*Delete or rename .*/40 to return to step 20"):
        checkpoints.restore(40, abstract_on(state, mesh_of(1)))
    with pytest.raises(CheckpointError, match="40 is damaged"):
        export(directory, 40, directory.parent / "out.safetensors")
    restored, _ = checkpoints.restore(20, abstract_on(state, mesh_of(1)))
    assert_same(restored, state)


@pytest.mark.parametrize(
    "content", ["", "[]", "null", '{"schema": 2}', '{"schema": 2, "step": 40, "time": 0, "num_processes": 1, "bytes"']
)
def test_a_record_that_is_no_record_is_damage(saved, directory, content):
    checkpoints, state = saved
    (directory / "40" / "record.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"40 is damaged: record.json"):
        checkpoints.restore(40, abstract_on(state, mesh_of(1)))


@pytest.mark.parametrize("field", ["step", "time", "bytes", "metrics", "leaves", "files", "record"])
@pytest.mark.parametrize("value", [None, [[1, 2, 3]]])
def test_a_record_with_a_wrong_field_is_damage(saved, directory, field, value):
    checkpoints, state = saved
    path = directory / "40" / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(CheckpointError):
        checkpoints.restore(40, abstract_on(state, mesh_of(1)))


def test_record_of_another_schema_is_refused(saved, directory):
    checkpoints, state = saved
    path = directory / "40" / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 3}))
    with pytest.raises(CheckpointError, match="schema 3; this spmdkit reads schema 2"):
        checkpoints.restore(40, abstract_on(state, mesh_of(1)))


def test_a_renamed_step_is_found_out(saved, directory):
    checkpoints, state = saved
    (directory / "40").rename(directory / "60")
    with pytest.raises(CheckpointError, match=r"60 is damaged: record.json is of step 40"):
        checkpoints.restore(60, abstract_on(state, mesh_of(1)))


def test_running_out_of_memory_is_not_called_damage(saved, monkeypatch):
    from spmdkit.checkpoint import orbax_backend

    def out_of_memory(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(orbax_backend, "load", out_of_memory)
    checkpoints, state = saved
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        checkpoints.restore(40, abstract_on(state, mesh_of(1)))
