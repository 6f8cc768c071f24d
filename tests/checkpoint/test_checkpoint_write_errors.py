"""A save that fails is told at the next call, with its cause, and costs no earlier checkpoint."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from spmdkit.checkpoint import Checkpoints, ignored_entries, orbax_backend
from spmdkit.checkpoint import record as records
from spmdkit.config.retention import Retention
from spmdkit.errors import CheckpointWriteError, ConfigError
from tests.support.checkpoint_states import assert_same

STATE = {"w": jnp.arange(4.0)}
WORKER = Path(__file__).parent / "checkpoint_worker.py"


@pytest.fixture
def full_disk(monkeypatch):
    """Writing the record meets a full disk, in the background, until the fixture's list is emptied."""
    real, broken = records.write_record, [True]

    def write(folder, record):
        if broken:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(folder, record)

    monkeypatch.setattr(records, "write_record", write)
    return broken


def wait_done(checkpoints):
    threading.Thread(target=checkpoints._pending.exception).run()


@pytest.mark.parametrize("call", ["save", "wait", "close", "restore"])
def test_failed_save_is_raised_once_with_its_cause(directory, full_disk, call, capfd):
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, STATE, {})
    wait_done(checkpoints)
    calls = {
        "save": lambda: checkpoints.save(2, STATE, {}),
        "restore": lambda: checkpoints.restore(1, STATE),
        "wait": checkpoints.wait,
        "close": checkpoints.close,
    }
    with pytest.raises(CheckpointWriteError, match=r"saving step 1 to .*No space left on device.*none yet") as caught:
        calls[call]()
    assert caught.value.exit_code == 74
    assert isinstance(caught.value.__cause__, OSError)
    assert (
        checkpoints.new_commits() == [] and checkpoints.steps() == [] and ignored_entries(checkpoints.directory) == []
    )
    assert "Traceback" not in capfd.readouterr().err
    checkpoints.close()


def test_save_after_a_failure_works(directory, full_disk):
    full_disk.clear()
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, STATE, {})
    checkpoints.wait()
    full_disk.append(True)
    checkpoints.save(2, STATE, {})
    with pytest.raises(CheckpointWriteError, match="intact are 1"):
        checkpoints.wait()
    full_disk.clear()
    checkpoints.save(2, STATE, {})
    assert checkpoints.wait() == [2]
    for step in (1, 2):
        assert_same(checkpoints.restore(step, jax.eval_shape(lambda: STATE))[0], STATE)
    checkpoints.close()


@pytest.mark.processes
def test_full_disk_exits_with_74_without_traceback(directory):
    done = subprocess.run(
        [sys.executable, WORKER, "small", directory], capture_output=True, text=True, timeout=120, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout + done.stderr
    for step, line in zip((2, 3), lines, strict=False):
        assert line.startswith(f"CheckpointWriteError 74 saving step {step}"), line
        assert "Failed to write" in line and "intact are 1" in line
    assert lines[2] == "steps [1, 4] ignored []"
    assert "Traceback" not in done.stderr


def test_save_that_would_fill_the_disk_is_refused(directory, monkeypatch):
    checkpoints = Checkpoints(directory)
    real = os.statvfs(directory)
    values = list(real)
    values[4] = 100  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    with pytest.raises(CheckpointWriteError, match=r"needs about 3.0 MiB, .* are free.*lower\s+checkpoint.keep"):
        checkpoints.save(1, {"w": jnp.zeros((2, 2**18))}, {})
    assert list(directory.iterdir()) == []
    monkeypatch.undo()
    checkpoints.save(1, STATE, {})
    assert checkpoints.close() == [1]


def test_a_directory_that_went_away_is_named(directory):
    checkpoints = Checkpoints(directory)
    shutil.rmtree(directory)
    with pytest.raises(CheckpointWriteError, match=r"cannot be used.*FileNotFoundError"):
        checkpoints.save(1, STATE, {})
    checkpoints.close()


def test_immediate_orbax_error_is_a_write_error(directory, monkeypatch):
    def refuse(*_):
        raise ValueError("orbax says no\nand more")

    checkpoints = Checkpoints(directory)
    monkeypatch.setattr(orbax_backend, "start_save", refuse)
    with pytest.raises(CheckpointWriteError, match=r"saving step 1 .*\(ValueError: orbax says no\)"):
        checkpoints.save(1, STATE, {})
    checkpoints.close()


def test_undeletable_old_step_is_reported_after_the_save(directory, monkeypatch):
    from spmdkit.checkpoint import retention

    def refuse(directory, step):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    checkpoints = Checkpoints(directory, retention=Retention(keep=1))
    checkpoints.save(1, STATE, {})
    monkeypatch.setattr(retention, "delete_step", refuse)
    checkpoints.save(2, STATE, {})
    with pytest.raises(CheckpointWriteError, match="step 2 is saved, but the old step 1 could not be deleted"):
        checkpoints.wait()
    assert checkpoints.new_commits() == [1, 2] and checkpoints.steps() == [1, 2]
    checkpoints.close()


@pytest.mark.parametrize("place", ["/proc/checkpoints", "{tmp}/file/checkpoints"])
def test_unusable_directory_is_a_config_error(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoints go to .*cannot be used.*Set run_dir") as caught:
        Checkpoints(place.format(tmp=tmp_path))
    assert caught.value.exit_code == 78
