"""The run directory: of another run, damaged, in use, not writable, full. Earlier checkpoints stay as they are."""

import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from spmdkit.checkpoint import RunLock
from tests.support.command_line import Case

OTHER_RUN = {
    "another model": Case(("run/checkpoints/2 into this task's state: 1 leaf differs (saved 4, asked 5).", "it (it is in the checkpoint's record), or set run_dir to a new folder to start anew."), "def init(key): return {'w': jnp.zeros((4, 8)), 'b': jnp.zeros(8), 'scale': jnp.ones(())}", exit=79),
    "another shape": Case(("run/checkpoints/2 into this task's state: 2 leaves differ (saved 4, asked 4).", "it (it is in the checkpoint's record), or set run_dir to a new folder to start anew."), "DATA = {'x': DATA['x'], 'y': DATA['y'][:, :6]}\ndef init(key): return {'w': jnp.zeros((4, 6)), 'b': jnp.zeros(6)}", exit=79),
    "another optimizer": Case(("run/checkpoints/2 into this task's state: 5 leaves differ (saved 4, asked 9).", "it (it is in the checkpoint's record), or set run_dir to a new folder to start anew."), task={"optimizer": "optax.adam(1e-3)"}, exit=79),
    "an average that was not kept": Case(("run/checkpoints/2 into this task's state: 2 leaves differ (saved 4, asked 6).", "it (it is in the checkpoint's record), or set run_dir to a new folder to start anew."), config={"ema": "0.9"}, exit=79),
    "another seed": Case(("run holds a run with seed: 0, saved at step 2; now seed is 1. A run keeps task, seed, batch_size,", "or its examples would be others. Set seed back, or give the new run a run_dir of its own."), config={"seed": "1"}),
    "another batch size": Case(("run holds a run with batch_size: 8, saved at step 2; now batch_size is 16. A run keeps task, seed,", "examples would be others. Set batch_size back, or give the new run a run_dir of its own."), config={"batch_size": "16"}),
    "another order": Case(("run holds a run with data.shuffle: true, saved at step 2; now data.shuffle is false. A run keeps", "would be others. Set data.shuffle back, or give the new run a run_dir of its own."), config={"data": "{shuffle: false}"}),
    "another number of examples": Case(("train_data is not what it was: batch 3 has other examples than when step 2 was saved (24 examples now). Bring the data back, or give the new run a run_dir of its own.",), "DATA = {'x': DATA['x'][:24], 'y': DATA['y'][:24]}"),
    "another task": Case(("run holds a run with task: task.py:task, saved at step 2; now task is task.py:make. A run keeps", "or its examples would be others. Set task back, or give the new run a run_dir of its own."), "other = None\n@sk.task\ndef make(): return task", config={"task": "task.py:make"}),
}  # fmt: skip

BELOW_A_FILE = {
    "a folder below a file": Case(
        (
            "task.py/run, which cannot be written (NotADirectoryError: [Errno 20] Not a directory: '",
            "task.py/run'). A run needs a folder of its own that it may write to. Set run_dir to one.",
        ),
        config={"run_dir": "task.py/run"},
    ),
    "a file": Case(
        (
            "task.py, which cannot be written (FileExistsError: [Errno 17] File exists: '",
            "task.py'). A run needs a folder of its own that it may write to. Set run_dir to one.",
        ),
        config={"run_dir": "task.py"},
    ),
    "a folder that Linux does not have": Case(
        (
            "run_dir is /proc/run, which cannot be written (FileNotFoundError: [Errno 2] No such file or",
            "'/proc/run'). A run needs a folder of its own that it may write to. Set run_dir to one.",
        ),
        config={"run_dir": "/proc/run"},
    ),
}


@pytest.mark.parametrize("name", OTHER_RUN)
def test_the_directory_of_another_run_is_not_continued(name, folder):
    OTHER_RUN[name].run(folder)


@pytest.mark.parametrize("name", BELOW_A_FILE)
def test_a_run_directory_that_cannot_be_written_is_told_before_training(name, folder):
    BELOW_A_FILE[name].run(folder)


def array_file(folder):
    """Returns a file that holds array data of the checkpoint."""
    return next((folder.path / "run/checkpoints/2/state").rglob("d/*"))


def test_a_truncated_checkpoint_is_told_and_not_replaced_by_a_new_start(folder):
    file = array_file(folder)
    file.write_bytes(file.read_bytes()[:-7])
    folder.write()
    folder.fails(
        79, "is damaged: state/", "were written (1 of ", "run/checkpoints/2 to start anew; there is no earlier step."
    )


def test_a_file_of_a_checkpoint_that_is_gone(folder):
    array_file(folder).unlink()
    folder.write()
    folder.fails(
        79, "is damaged: state/", " is missing (1 of ", "run/checkpoints/2 to start anew; there is no earlier step."
    )


def test_bytes_of_a_checkpoint_that_have_changed(folder):
    for file in (folder.path / "run/checkpoints/2/state").rglob("d/*"):
        file.write_bytes(bytes(file.stat().st_size))
    folder.write()
    folder.fails(79, "is damaged: ", "run/checkpoints/2 to start anew; there is no earlier step.")


def test_a_record_that_is_no_record(folder):
    (folder.path / "run/checkpoints/2/record.json").write_text("{")
    folder.write()
    folder.fails(
        79, "is damaged: record.json cannot be read (", "run/checkpoints/2 to start anew; there is no earlier step."
    )


def test_a_foreign_folder_in_the_place_of_a_checkpoint(folder):
    (folder.path / "run/checkpoints/4").mkdir()
    (folder.path / "run/checkpoints/4/notes.txt").write_text("mine")
    folder.write()
    folder.fails(74, "saving step 4 to", "run/checkpoints/4.", may_train=True)


def test_a_file_in_the_place_of_the_checkpoints(folder):
    shutil.rmtree(folder.path / "run/checkpoints")
    (folder.path / "run/checkpoints").write_text("mine")
    folder.write()
    folder.fails(
        78,
        "checkpoints go to",
        "run/checkpoints'). It must be a folder that this process may write to. Set run_dir to one.",
    )


def test_a_folder_in_the_place_of_the_metrics(folder):
    (folder.path / "run/metrics.jsonl").unlink()
    (folder.path / "run/metrics.jsonl").mkdir()
    folder.write()
    folder.fails(
        78,
        "run/metrics.jsonl: cannot be written: Is a directory (error 21). A run needs a folder that it can",
        "mend the permissions, or set run_dir to another folder, and start the same command again.",
    )


def test_a_directory_that_is_in_use(folder):
    folder.write()
    with RunLock(folder.path / "run"):
        folder.fails(
            78,
            "run directory",
            "at a time may write to it. Wait for that run, end it, or set run_dir to another folder.",
        )


def test_a_loss_that_is_not_finite(folder):
    Case(
        ("the loss is inf at step 4 (it was 5.6", "The newest checkpoint is of step 2. Lower the learning rate"),
        task={"optimizer": "optax.sgd(1e30)"},
        config={"log": "{every_steps: 1}", "steps": "9"},
        exit=77,
        may_train=True,
    ).run(folder)


def test_a_disk_with_too_little_room_for_a_checkpoint(folder, monkeypatch):
    whole = os.statvfs
    full = SimpleNamespace(f_bavail=10, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: full if "checkpoints" in str(path) else whole(path))
    folder.write()
    folder.fails(
        74,
        "saving step 4 to",
        "are intact. Free some space, lower checkpoint.keep, or set run_dir on another disk.",
        may_train=True,
    )


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
    folder.fails(
        74,
        "saving step 4 to",
        "are intact. Free some space, lower checkpoint.keep, or set run_dir on another disk.",
        may_train=True,
    )


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
    folder.fails(
        78,
        "disk/run, which cannot be written (OSError: [Errno 28] No space left on device). A run needs a folder of its own that it may write to. Set run_dir to one.",
    )
