"""FIFOs, devices, links and huge files in a checkpoint are damage: no command waits for them or reads them whole."""

import os
import re
import shutil

import pytest

from spmdkit.checkpoint import Checkpoints, inspect, ls, quarantine, verify
from spmdkit.checkpoint import record as records
from spmdkit.checkpoint.weights import open_checkpoint
from spmdkit.errors import CheckpointError
from tests.support.blocked import fails_if_blocked
from tests.support.checkpoint_states import mesh_of, place, train_state


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(directory)
    checkpoints.save(20, place(train_state(), mesh_of(1)), {"seed": 1})
    checkpoints.close()
    return directory


LIMIT = 2**20
"""The limit of a file of metadata here: one of 1 GiB takes seconds to read."""


@pytest.fixture
def step(original, tmp_path, monkeypatch):
    """The folder of a step. A read that blocks is interrupted."""
    monkeypatch.setattr(records, "MAX_METADATA_BYTES", LIMIT)
    shutil.copytree(original, tmp_path / "checkpoints")
    with fails_if_blocked():
        yield tmp_path / "checkpoints/20"


def fifo(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def moved(path):
    """Moves a file or folder of the step next to the checkpoints, and links to it."""
    to = next(folder for folder in path.parents if folder.name == "checkpoints").with_name(f"moved_{path.name}")
    shutil.move(path, to)
    path.symlink_to(to)


def huge(path):
    os.truncate(path, LIMIT + 1)


CASES = [
    (fifo, "state/_METADATA", "is a FIFO"),
    (fifo, "state/manifest.ocdbt", "is a FIFO"),
    (fifo, "state/unrecorded", "is a FIFO"),
    (device, "state/manifest.ocdbt", "is a link"),
    (moved, "state/manifest.ocdbt", "is a link"),
    (moved, "state/d", "is a link"),
    (moved, "state", "is a link"),
    (huge, "state/_METADATA", f"has {LIMIT + 1} bytes"),
]


@pytest.mark.parametrize(("make", "name", "found"), CASES)
@pytest.mark.parametrize("listed", [False, True])
def test_special_file_is_damage(step, make, name, found, listed):
    make(step / name)
    if listed:  # as the writer of a hostile checkpoint does
        record = records.read_record(step.parent, 20)
        record.files[name] = (step / name).stat().st_size
        records.write_record(step, record)
    all_name_it(step.parent, f"{name} {found}")


@pytest.mark.parametrize(
    ("change", "found"),
    [(moved, "it is a link"), (lambda path: os.truncate(path, records.MAX_RECORD_BYTES + 1), "at most 67108864")],
)
def test_record_is_a_file_of_limited_size(step, change, found):
    change(step / "record.json")
    all_name_it(step.parent, f"record.json cannot be read .*{found}")
    with pytest.raises(CheckpointError, match=found):
        inspect(step.parent, 20)


def all_name_it(directory, found):
    _, damaged = quarantine.newest_valid(directory, None, ())
    for text in (ls(directory)[0]["found"], verify(directory)[0]["found"], damaged[20]):
        assert re.search(found, text), text
    with pytest.raises(CheckpointError, match=found), open_checkpoint(directory, 20):
        pass


@pytest.mark.parametrize("make", [fifo, device])
def test_record_that_is_no_file_is_no_checkpoint(step, make):
    make(step / "record.json")
    assert ls(step.parent) == [] and [*quarantine.steps_without_record(step.parent)] == ["20"]
    with pytest.raises(CheckpointError, match=r"20 is damaged: record.json cannot be read"):
        inspect(step.parent, 20)
