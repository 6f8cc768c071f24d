"""Real processes in a tenth of the time: one process imports all modules once, and forks for each requested process.

At the fork there is no device and no thread. A forked process has a separate environment, folder, arguments and output.
Settings that Python reads at startup (another PYTHONPATH, other packages) need `fresh`. The workers of pytest-xdist
share the server of the reporting process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmdkit.foundation.constants import COMPILE_CACHE
from tests.support.environment import environment_of_a_user

REPOSITORY = Path(__file__).resolve().parents[2]

SERVERS: set[int] = set()
"""Ids of the live fork servers of a test."""

ADDRESS = "SPMDKIT_TEST_FORKS"
"""The environment variable that passes the address of the shared server to the workers."""

ENDED_CPU_S = [0.0]
"""Processor seconds of the forked processes of this process that have ended."""


@dataclass(frozen=True)
class Process:
    """One process: its arguments after `spmdkit`, or a script and its arguments; folder, and environment variables in
    addition to those of the test.

    `forks`: it is a launcher, and its children are forked from it.
    """

    arguments: list[str]
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    fresh: bool = False
    forks: bool = False


@dataclass(frozen=True)
class Ended:
    """How a process ended. Signal n is code -n, and -9 after its deadline. `seconds`: since its start."""

    code: int
    output: str
    seconds: float


class Child:
    """A started process with the methods of `subprocess.Popen`. Its output is written to a file, which is read at its
    end."""

    def __init__(self, forks: Forks, pid: int, output: Path):
        self.returncode: int | None = None
        self.pid, self.seconds, self._forks, self._output, self._begin = pid, 0.0, forks, output, time.monotonic()

    def poll(self) -> int | None:
        """Returns the exit code, or None while it runs."""
        if self.returncode is None:
            self.returncode, cpu_s = self._forks.ask({"ended": self.pid})
            self.seconds = time.monotonic() - self._begin
            ENDED_CPU_S[0] += cpu_s
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        """Returns the exit code. Raises `TimeoutExpired`."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout, self.text())
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float = 60) -> tuple[str, None]:
        self.wait(timeout)
        return self.text(), None

    def text(self) -> str:
        """Returns its output so far."""
        return self._output.read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kills the process and its remaining children."""
        for kill in (os.killpg, os.kill):  # it may not have a process group yet
            if self.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
        self.wait(30)


class Server:
    """The fork server, as a context manager. It imports when its first client connects."""

    def __enter__(self) -> Server:
        self._folder = tempfile.TemporaryDirectory(prefix="spmdkit-forks-")
        self.address = str(Path(self._folder.name, "socket"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)
            self._server = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, str(listener.fileno())],
                env=_environment(),
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()
        self._folder.cleanup()


def _environment() -> dict[str, str]:
    from tests.support.compile_cache import FOLDER

    return environment_of_a_user() | {"PYTHONPATH": str(REPOSITORY), FOLDER: os.environ[FOLDER]}


class Forks:
    """Starts processes by the shared fork server, or a new one, as a context manager."""

    def __enter__(self) -> Forks:
        self._server = None if ADDRESS in os.environ else Server().__enter__()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[ADDRESS] if self._server is None else self._server.address)
        self._lines = self._socket.makefile("rw")
        self._env = _environment()
        self._outputs = tempfile.TemporaryDirectory()
        self._started: list[Child] = []
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._started:
            child.end()
        self._lines.close()
        self._socket.close()
        if self._server is not None:
            self._server.__exit__()
        self._outputs.cleanup()

    def ask(self, asked: dict[str, Any]) -> Any:
        """Returns the response of the fork server."""
        self._lines.write(json.dumps(asked) + "\n")
        self._lines.flush()
        return json.loads(self._lines.readline())

    def start(self, process: Process) -> Child:
        output = Path(self._outputs.name, str(len(self._started)))
        asked = {
            "start": process.arguments,
            "folder": str(process.folder),
            "env": self._env | process.variables,
            "output": str(output),
            "fresh": process.fresh,
            "forks": process.forks,
        }
        self._started.append(Child(self, self.ask(asked), output))
        return self._started[-1]

    def run(self, processes: list[Process], timeout_s: float = 60) -> list[Ended]:
        """Starts processes together and returns how each ended. Each is killed after `timeout_s`."""
        children = [self.start(process) for process in processes]
        deadline = time.monotonic() + timeout_s
        while sum(child.poll() is None for child in children):  # polls each, to record when it ended
            if time.monotonic() > deadline:
                for child in children:
                    child.end()
            time.sleep(0.02)
        return [Ended(child.wait(), child.text(), child.seconds) for child in children]

    def together(self, processes: list[Process], timeout_s: float = 60) -> list[Ended]:
        """Runs the processes of one training job and returns how each ended; process i is number i."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        place = {"SPMDKIT_COORDINATOR": coordinator, "SPMDKIT_NUM_PROCESSES": str(len(processes))}
        numbered = [
            Process(p.arguments, p.folder, place | {"SPMDKIT_PROCESS_ID": str(i)} | p.variables, p.fresh)
            for i, p in enumerate(processes)
        ]
        return self.run(numbered, timeout_s)


# ---- the fork server


def _start(asked: dict[str, Any]) -> int:
    """Returns the id of a process that runs `spmdkit` with the requested arguments."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.setsid()
        _die_with_the_parent()
        os.chdir(asked["folder"])
        output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(output, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
        if asked["fresh"]:
            os.execve(sys.executable, [sys.executable, "-m", "spmdkit", *asked["start"]], asked["env"])
        os.environ.clear()
        os.environ.update(asked["env"])
        tempfile.tempdir = None  # TMPDIR is read once
        from tests.support import compile_cache

        compile_cache.use(os.environ.get(COMPILE_CACHE) == "off")
        sys.path[0] = asked["folder"]
        if asked["forks"]:
            from spmdkit.launch import local

            local._start = start_forked
        code = _run(asked["start"])
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def _run(arguments: list[str]) -> int:
    """Runs a script or a command of spmdkit, and returns its exit code."""
    from spmdkit.cli import main

    return (_run_script if arguments[0].endswith(".py") else main)(arguments) or 0


def _run_script(arguments: list[str]) -> int:
    """Runs a script as `python` does: with its arguments, and the hook of uncaught exceptions."""
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except Exception:  # noqa: BLE001 - as python does
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _die_with_the_parent() -> None:
    """Cleans up after a killed test: the fork server exits when its input closes, and all forked processes exit with it
    (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)


class Forked:
    """A child of a launcher, with the methods of `subprocess.Popen` that the launcher uses."""

    def __init__(self, pid: int, stdout: int, stderr: int):
        self.pid, self.stdout, self.stderr = pid, os.fdopen(stdout, "rb"), os.fdopen(stderr, "rb")

    def wait(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def start_forked(command: list[str], env: dict[str, str], pass_fds: list[int]) -> Forked:
    """Forks a launcher's child to run a script or an spmdkit command without a new interpreter. The launcher has no
    other thread at this point."""
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(out_end)
        os.close(err_end)
        return Forked(pid, out, err)
    code = 99
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        _die_with_the_parent()
        os.dup2(out_end, 1)
        os.dup2(err_end, 2)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None
        code = _run(command[1 if command[1].endswith(".py") else 3 :])
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def _ended(pid: int) -> tuple[int | None, float]:
    """Returns (exit code, processor seconds) of a process that has ended, or (None, 0)."""
    done, status, used = os.wait4(pid, os.WNOHANG)
    return (os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime) if done else (None, 0.0)


@functools.cache
def _import() -> None:
    """Imports what a process imports at its start and later, which would take a third of its processor time."""
    gc.disable()  # imports leave no garbage
    import spmdkit.checkpoint.orbax_backend
    import spmdkit.cli
    import spmdkit.data.grain_reader
    import spmdkit.metrics.report.plan
    import spmdkit.plan.document
    import spmdkit.plan.machine.calibrate
    import spmdkit.run.evaluator
    import spmdkit.run.loop
    from spmdkit.foundation import plugins
    from spmdkit.metrics.environment import package_versions
    from spmdkit.program.source_digest import package_digests
    from tests.support import compile_cache

    compile_cache.CompileCache()
    for cached in (spmdkit.cli._command, plugins._entry_points, package_digests, package_versions):
        cached()  # once instead of in each process
    for group in ("default_hooks", "environments", "findings", "preemption_sources", "streams", "syncs"):
        plugins.load_all(group)
    gc.freeze()
    gc.enable()


def _serve(listener: socket.socket) -> None:
    """Responds to the requests of its clients until its input closes: the tests have ended."""
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                return
            if key.fileobj is listener:
                _import()
                client, _ = listener.accept()
                selector.register(client, selectors.EVENT_READ, client.makefile("rw"))
            elif line := key.data.readline():
                asked = json.loads(line)
                response = _start(asked) if "start" in asked else _ended(asked["ended"])
                key.data.write(json.dumps(response) + "\n")
                key.data.flush()
            else:
                selector.unregister(key.fileobj)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
