"""One command as several processes that find each other as under `spmdkit launch`, without the launcher."""

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
    """How a process ended, with all that it wrote."""

    code: int
    output: str


def run_ranks(command, size, timeout_s=120.0, env=None, cwd=REPOSITORY):
    """Returns how each of `size` processes ended, in the order of their ranks; all are killed after `timeout_s`."""
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
        pass  # the codes say it
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
