"""Runs of `sync: parameter_server` on Ray, observed externally: their events, and the processes that they start."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmdkit.parameter_server.ray_local import MARK

ROOT = Path(__file__).parents[2]
LINE = ROOT / "configs" / "parameter_server.yaml"
DIGITS = ROOT / "configs" / "parameter_server_digits.yaml"

LIMIT_S = 250
"""Bounds a hang, and is below the limit of a test. A run takes 15 processor seconds, most of them to start."""
OWN_CLUSTER = "SPMDKIT_TEST_CLUSTER"
ON_LOOPBACK = """
from ray._private import services
services.resolve_ip_for_localhost = lambda host: host  # otherwise Ray takes the host's address for 127.0.0.1, here and where it listens
from {module} import main
raise SystemExit(main())
"""  # noqa: E501


class Driver:
    """`spmdkit train CONFIG` in a separate process, in a directory.

    Attributes:
        pid: process ID of the coordinator.
    """

    def __init__(self, folder: Path, *overrides: str, config: Path = LINE, cluster: Cluster | None = None):
        self.run = folder / "run"
        self._others = {mark for mark, _ in _marks()}
        self._log = folder / f"driver-{len(list(folder.glob('driver-*')))}.txt"
        python = ["-m", "spmdkit"] if cluster is None else ["-c", ON_LOOPBACK.format(module="spmdkit.__main__")]
        command = [sys.executable, *python, "train", str(config), f"run_dir={self.run}", "log.progress=plain"]
        inherited = {**os.environ, "PYTHONPATH": str(ROOT), **({} if cluster is None else cluster.environment)}
        with self._log.open("wb") as out:
            self._process = subprocess.Popen([*command, *overrides], env=inherited, stdout=out, stderr=out)
        self.pid = self._process.pid

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in _lines(self.run / "events.jsonl") if event["event"] == name]

    def metrics(self) -> list[dict[str, Any]]:
        return _lines(self.run / "metrics.jsonl")

    def wait_for(self, what: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """Waits for and returns a true value of `what()`, while the driver runs."""
        return wait_for(what, limit_s, lambda: self._process.poll() is None, self.said)

    def ends(self, limit_s: float = LIMIT_S) -> int:
        """Waits for the end and returns the exit status."""
        wait_for(lambda: self._process.poll() is not None, limit_s, said=self.said)
        return self._process.returncode

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def started(self) -> dict[int, str]:
        """Returns pid -> command of the processes that the run has started, which have its mark."""
        return {pid: command_of(pid) for mark, pid in _marks() if mark not in self._others}


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_for(
    what: Callable[[], Any],
    limit_s: float = LIMIT_S,
    lives: Callable[[], bool] = lambda: True,
    said: Callable[[], str] = lambda: "",
) -> Any:
    """Waits for and returns a true value of `what()`."""
    end = time.monotonic() + limit_s
    while not (found := what()):
        assert lives(), said()
        assert time.monotonic() < end, f"it did not come within {limit_s} s\n{said()}"
        time.sleep(0.1)
    return found


def _marks(name: str = MARK) -> list[tuple[str, int]]:
    """Returns (NAME=value, pid) of every process on this machine with this variable in its environment, by default of
    processes that runs on Ray have started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            entries = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found += [(entry.decode(), int(folder.name)) for entry in entries if entry.startswith(f"{name}=".encode())]
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def pid_of(event: dict[str, Any]) -> int:
    """Returns the process of an event `worker_running` or `server_running`."""
    return int(event["where"].split()[1])


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


class Cluster:
    """An external cluster: `ray start --head` of one node with two CPUs, on the loopback interface, with a token.

    Attributes:
        address: address of the cluster.
        environment: variables with which a driver can connect.
    """

    def __init__(self, folder: Path):
        self._sockets = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a socket's path is short
        self._mark, token = secrets.token_hex(16), folder / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        options = f"--head --block --num-cpus=2 --include-dashboard=false --object-store-memory={2**27}".split()
        places = [f"--port={self.address.split(':')[1]}", "--node-ip-address=127.0.0.1", f"--temp-dir={self._sockets}"]
        own = {**os.environ, **self.environment, "PYTHONPATH": str(ROOT), OWN_CLUSTER: self._mark}
        self._log = folder / "cluster.txt"
        with self._log.open("wb") as out:
            command = [
                sys.executable,
                "-c",
                ON_LOOPBACK.format(module="ray.scripts.scripts"),
                "start",
                *options,
                *places,
            ]
            self._process = subprocess.Popen(command, env=own, stdout=out, stderr=out, start_new_session=True)
        said = lambda: self._log.read_text(errors="replace")
        try:
            wait_for(lambda: "Ray runtime started" in said(), 60, self.runs, said)
        except BaseException:
            self.end()
            raise

    def runs(self) -> bool:
        return self._process.poll() is None

    def processes(self) -> dict[int, str]:
        """Returns pid -> command of all processes of the cluster."""
        return {pid: command_of(pid) for mark, pid in _marks(OWN_CLUSTER) if mark == f"{OWN_CLUSTER}={self._mark}"}

    def end(self) -> None:
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    kill(pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)
        shutil.rmtree(self._sockets, ignore_errors=True)
