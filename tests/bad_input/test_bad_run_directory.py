"""The run directory: of another run, damaged, in use, not writable, full. Earlier checkpoints stay as they are."""

import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from spmdkit.checkpoint import run_lock
from tests.bad_input.repairs import REPAIRS
from tests.support.command_line import Case
from tests.support.messages import Parts

OTHER_RUN = {
    "another model": Case(Parts(requested="run/checkpoints/2 into", found="1 leaf differs (saved 4, requested 5)", repair=("checkpoint's record", "set run_dir")), task={"init": "lambda key: init(key) | {'scale': jnp.ones(())}"}, exit=79),
    "another optimizer": Case(Parts(requested="run/checkpoints/2 into", found="5 leaves differ (saved 4, requested 9)", repair=("checkpoint's record", "set run_dir")), task={"optimizer": "optax.adam(1e-3)"}, exit=79),
    "another seed": Case(Parts(requested="now seed is 1", found=("seed: 0", "saved at step 2"), rule="must not change during a run", repair=("Restore seed", "set run_dir to a new folder")), config={"seed": "1"}),
    "another number of examples": Case(Parts(requested="train_data", found=("batch 3", "step 2", "24 examples now"), repair=("Restore the data", "set run_dir to a new folder")), task={"train_data": "{'x': x[:24], 'y': DATA['y'][:24]}"}),
    "another task": Case(Parts(requested="now task is task.py:make", found=("task: task.py:task", "saved at step 2"), rule="must not change during a run", repair=("Restore task", "set run_dir to a new folder")), "other = None\n@sk.task\ndef make(): return task", config={"task": "task.py:make"}),
}  # fmt: skip

UNWRITABLE = {
    "a folder below a file": ("task.py/run", "NotADirectoryError: [Errno 20]"),
    "a folder that Linux does not have": ("/proc/run", "FileNotFoundError: [Errno 2]"),
}


@pytest.mark.parametrize("name", OTHER_RUN)
def test_the_directory_of_another_run_is_not_continued(name, folder):
    OTHER_RUN[name].run_and_repair(folder, REPAIRS["run directory"][name], is_new=False)


@pytest.mark.parametrize("name", UNWRITABLE)
def test_an_unwritable_directory_is_reported_before_training(name, folder):
    run_dir, found = UNWRITABLE[name]
    assert_parts = Parts(run_dir, ("cannot be written", found), "its own folder", "Set run_dir")
    Case(assert_parts, config={"run_dir": run_dir}).run(folder)


def array_file(folder):
    """Returns a file that holds array data of the checkpoint."""
    return next((folder.path / "run/checkpoints/2/state").rglob("d/*"))


def truncate(folder):
    file = array_file(folder)
    file.write_bytes(file.read_bytes()[:-7])


DAMAGE = {
    "a truncated file": (truncate, ("2: state/", "were written (1 of ")),
    "a record that is no record": (
        lambda folder: (folder.path / "run/checkpoints/2/record.json").write_text("{"),
        "2: record.json cannot be read",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_stops_the_run(name, folder):
    damage, found = DAMAGE[name]
    damage(folder)
    folder.write()
    folder.fails(79, Parts("is damaged", found, repair="set run_dir to a new folder to start again"))


def test_a_foreign_folder_of_a_step_is_quarantined(folder):
    (folder.path / "run/checkpoints/4").mkdir()
    (folder.path / "run/checkpoints/4/notes.txt").write_text("mine")
    folder.write()
    assert folder.leaves("train", "run.yaml") == 0
    assert (folder.path / "run/checkpoints/4.damaged/notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("what", "command"),
    [("file", "train run.yaml"), ("link", "eval run.yaml"), ("folder", "checkpoint inspect run --step 2")],
)
def test_an_unreadable_step_exits_with_79(folder, what, command):
    step = folder.path / "run/checkpoints/2"
    shutil.rmtree(step)
    if what == "file":
        step.write_text("mine")
    elif what == "link":
        step.symlink_to(step)  # to itself
    else:
        (step / "record.json").mkdir(parents=True)
    folder.write()
    text = folder.fails(79, Parts("run/checkpoints"), command.split())
    assert len(text.splitlines()) < 12


def test_a_file_in_the_place_of_the_checkpoints(folder):
    shutil.rmtree(folder.path / "run/checkpoints")
    (folder.path / "run/checkpoints").write_text("mine")
    folder.write()
    folder.fails(
        78, Parts("checkpoints go to", "run/checkpoints'", "a folder with write permission", repair="Set run_dir")
    )


def test_a_folder_in_the_place_of_the_metrics(folder):
    (folder.path / "run/metrics.jsonl").unlink()
    (folder.path / "run/metrics.jsonl").mkdir()
    folder.write()
    found = ("cannot be written", "Is a directory (error 21)")
    repair = ("permissions", "set run_dir", "same command again")
    folder.fails(78, Parts("run/metrics.jsonl", found, "A run needs a writable folder", repair))


def test_a_directory_that_is_in_use(folder):
    folder.write()
    with run_lock(folder.path / "run"):
        repair = ("Wait for that run", "set run_dir")
        folder.fails(78, Parts("run directory", f"process {os.getpid()}", "at a time may write to it", repair))


def test_a_loss_that_is_not_finite(folder):
    Case(
        Parts(
            "not finite at step 4: the loss ('loss' is inf)",
            "was 5.6",
            rule="have to be finite",
            repair=("checkpoint is of step 2", "Lower the learning rate"),
        ),
        task={"optimizer": "optax.sgd(1e30)"},
        config={"log": "{every_steps: 1}", "steps": "9"},
        exit=77,
        may_train=True,
    ).run(folder)


DISK_FULL = Parts("saving step 4 to", "are intact", repair=("Free some space", "checkpoint.keep", "set run_dir"))


def test_a_disk_with_too_little_room(folder, monkeypatch):
    whole = os.statvfs
    full = SimpleNamespace(f_bavail=10, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: full if "checkpoints" in str(path) else whole(path))
    folder.write()
    folder.fails(74, DISK_FULL, may_train=True)


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("this machine does not let the test mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_is_full(folder, small_disk):
    shutil.move(folder.path / "run", small_disk / "run")
    (folder.path / "run").symlink_to(small_disk / "run")
    (small_disk / "other").write_bytes(bytes(1_500_000))
    folder.write()
    folder.fails(74, DISK_FULL, may_train=True)


def test_a_disk_without_a_single_byte(folder, small_disk):
    shutil.move(folder.path / "run", small_disk / "run")
    (folder.path / "run").symlink_to(small_disk / "run")
    with open(small_disk / "other", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    folder.write()
    found = ("cannot be written", "[Errno 28] No space left on device")
    folder.fails(74, Parts("disk/run", found, "its own folder", "Set run_dir"))
