"""The small process that outlives a killed driver: it ends what carries the run's mark, and nothing else. Needs no
Ray."""

import os
import signal
import subprocess
import sys

import pytest

from spmdkit.parameter_server.ray_local import GUARD, MARK

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
