"""One run per directory; a directory that cannot be written is told before anything else."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spmdkit.checkpoint import prepare_run_dir, run_lock
from spmdkit.errors import CheckpointWriteError, ConfigError

WORKER = Path(__file__).parent / "checkpoint_worker.py"


def test_a_directory_is_made_and_left_empty(tmp_path):
    path = prepare_run_dir(tmp_path / "runs" / "first")
    assert path.is_dir() and list(path.iterdir()) == []


@pytest.mark.parametrize("place", ["/proc/run", "{tmp}/file", "{tmp}/file/run", "/proc", "/dev/null/run"])
def test_unwritable_directory_is_a_config_error(tmp_path, place):
    (tmp_path / "file").write_text("")
    for use in (prepare_run_dir, held):
        with pytest.raises(ConfigError, match=r"run_dir is .*cannot be written .*Set run_dir to one") as caught:
            use(place.format(tmp=tmp_path))
        assert caught.value.exit_code == 78


def test_a_full_disk_is_told_at_the_start(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointWriteError, match=r"run_dir is .*No space left on device"):
        prepare_run_dir(tmp_path)


def held(path):
    with run_lock(path):
        return True


def test_the_lock_is_exclusive_and_names_its_owner(tmp_path):
    owner = f"in use by process {os.getpid()} on {socket.gethostname()} since 20"
    with run_lock(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
        with pytest.raises(ConfigError, match=owner):
            held(tmp_path)
        os.truncate(tmp_path / "run.lock", 0)
        with pytest.raises(ConfigError, match="in use by another process"):
            held(tmp_path)
    assert (tmp_path / "run.lock").read_text() == "" and held(tmp_path)


def test_a_lock_that_is_no_file_is_refused(tmp_path):
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(ConfigError, match="must be a plain file"):
        held(tmp_path)


@pytest.mark.processes
def test_lock_holds_until_its_process_is_killed(tmp_path):
    owner = subprocess.Popen([sys.executable, WORKER, "lock", tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "held\n"
        (tmp_path / "run.lock").unlink()  # the folder is locked too
        with pytest.raises(ConfigError, match="in use by another process"):
            held(tmp_path)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        owner.stdout.close()
    assert held(tmp_path)
