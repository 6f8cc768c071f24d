"""Real processes in a tenth of the time: one process imports everything once, and forks for each one that is asked for.

What is forked has no device and no thread yet; it has its own environment, folder, arguments and output, as any process has. What a
process reads while Python starts (another PYTHONPATH, other packages) needs `fresh`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
NOT_PASSED_ON = ("JAX_", "XLA_", "SPMDKIT_")


@dataclass(frozen=True)
class Process:
    """One process: its arguments after `spmdkit`, folder, and variables beside those of the test."""

    arguments: list[str]
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    fresh: bool = False


@dataclass(frozen=True)
class Ended:
    """How a process ended. `signal` n is code -n, of one that outlived its deadline -9; `seconds` since all were started."""

    code: int
    output: str
    seconds: float


class Forks:
    """The process that forks; a context manager."""

    def __enter__(self) -> Forks:
        env = {k: v for k, v in os.environ.items() if not k.startswith(NOT_PASSED_ON)}
        command = [sys.executable, "-W", "ignore", __file__]
        self._env = env | {"PYTHONPATH": str(REPOSITORY)}
        self._server = subprocess.Popen(
            command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()

    def run(self, processes: list[Process], timeout_s: float = 60) -> list[Ended]:
        """Returns how processes ended that were started together. None lives longer than `timeout_s`."""
        assert self._server.stdin is not None and self._server.stdout is not None
        with tempfile.TemporaryDirectory() as outputs:
            files = [str(Path(outputs, str(number))) for number in range(len(processes))]
            asked = [
                {
                    "arguments": p.arguments,
                    "folder": str(p.folder),
                    "env": self._env | p.variables,
                    "output": file,
                    "fresh": p.fresh,
                }
                for p, file in zip(processes, files, strict=True)
            ]
            self._server.stdin.write(json.dumps({"processes": asked, "timeout_s": timeout_s}) + "\n")
            self._server.stdin.flush()
            ended = json.loads(self._server.stdout.readline())
            texts = [Path(file).read_text(errors="replace") for file in files]
        return [Ended(code, text, seconds) for (code, seconds), text in zip(ended, texts, strict=True)]

    def together(self, processes: list[Process], timeout_s: float = 60) -> list[Ended]:
        """Returns how processes ended that train together: process i is number i."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        place = {"SPMDKIT_COORDINATOR": coordinator, "SPMDKIT_NUM_PROCESSES": str(len(processes))}
        numbered = [
            Process(p.arguments, p.folder, place | {"SPMDKIT_PROCESS_ID": str(i)} | p.variables, p.fresh)
            for i, p in enumerate(processes)
        ]
        return self.run(numbered, timeout_s)


# ---- the process that forks --------------------------------------------------------------------------------------------


def _start(asked: dict[str, Any]) -> int:
    """Returns the id of a process that runs `spmdkit` with the asked arguments."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.setsid()
        os.chdir(asked["folder"])
        output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(output, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        if asked["fresh"]:
            os.execve(sys.executable, [sys.executable, "-m", "spmdkit", *asked["arguments"]], asked["env"])
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.path[0] = asked["folder"]
        from spmdkit.cli import main

        code = main(asked["arguments"]) or 0
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(pids: list[int], timeout_s: float) -> list[tuple[int, float]]:
    """Returns (code, seconds) of each process; those that are late are killed."""
    begin, ended = time.monotonic(), dict[int, tuple[int, float]]()
    while len(ended) < len(pids):
        for pid in set(pids) - set(ended):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[pid] = os.waitstatus_to_exitcode(status), time.monotonic() - begin
            elif time.monotonic() - begin > timeout_s:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [ended[pid] for pid in pids]


def _serve() -> None:
    import spmdkit.checkpoint.storage
    import spmdkit.cli
    import spmdkit.run.loop  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        pids = [_start(process) for process in asked["processes"]]
        print(json.dumps(_wait(pids, asked["timeout_s"])), flush=True)


if __name__ == "__main__":
    _serve()
