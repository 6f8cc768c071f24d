"""The small process that outlives a killed driver: it ends what carries the run's mark, and nothing else. Needs no
Ray."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spmdkit.errors import ConfigError
from spmdkit.parameter_server.ray_local import GUARD, MARK, LocalRay

pytestmark = pytest.mark.processes


def test_marked_processes_end_with_their_driver(tmp_path):
    folder, token = tmp_path / "ray", tmp_path / "token"
    folder.mkdir()
    token.write_text("secret")
    sleep = lambda mark: subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: mark})
    own, other = sleep("mine"), sleep("mine too")
    command = [sys.executable, "-I", "-S", "-c", GUARD, MARK, "mine", str(folder), str(token), str(os.getpid())]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            guard.wait(0.5)
        assert own.poll() is None and folder.exists()
        guard.stdin.close()  # what the kernel does when the driver dies
        guard.wait(30)
        assert own.wait(5) == -signal.SIGKILL and other.poll() is None
        assert not folder.exists() and not token.exists()
    finally:
        for process in (own, other, guard):
            process.kill()
            process.wait()


def test_ray_that_does_not_start_is_started_again(tmp_path, monkeypatch):
    """Ray gives up after 30 s, also on a machine that is only busy."""
    folders, failures = [], 2

    def init(local):
        folders.append(Path(local._folder))
        if len(folders) <= failures:
            raise RuntimeError("timed out during startup")

    monkeypatch.setattr(LocalRay, "_init", init)
    ray = LocalRay(tmp_path, 1, 0)
    ray.start()
    assert [folder.is_dir() for folder in folders] == [False, False, True] and MARK in os.environ
    ray.close()
    assert not folders[2].is_dir() and not (tmp_path / "ray.token").exists() and MARK not in os.environ
    failures = 6
    with pytest.raises(ConfigError, match=r"did not start on this machine \(RuntimeError: timed out during startup"):
        ray.start()
    assert len(folders) == 6 and MARK not in os.environ
