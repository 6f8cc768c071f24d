"""Runs one command as several processes that join as under `spmdkit launch`, without the launcher."""

import dataclasses
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.support.environment import environment_of_a_user

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended, with its output."""

    code: int
    output: str


def run_ranks(command, size, timeout_s=120.0, env=None, cwd=REPOSITORY):
    """Runs `size` processes and returns how each ended, in rank order. All are killed after `timeout_s`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    running, files = [], []
    for rank in range(size):
        place = {
            "SPMDKIT_COORDINATOR": coordinator,
            "SPMDKIT_NUM_PROCESSES": str(size),
            "SPMDKIT_PROCESS_ID": str(rank),
        }
        whole = {
            **environment_of_a_user(),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(REPOSITORY),
            **place,
            **(env or {}),
        }
        files.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115  closed below
        running.append(subprocess.Popen(command, env=whole, stdout=files[-1], stderr=subprocess.STDOUT, cwd=cwd))
    deadline = time.monotonic() + timeout_s
    try:
        for process in running:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # reported by the codes
    finally:
        for process in running:
            process.kill()
            process.wait()
    ended = []
    for process, file in zip(running, files, strict=True):
        file.seek(0)
        ended.append(Ended(process.returncode, file.read()))
        file.close()
    return ended
