"""Commands without the start of Python: a server imports jax and spmdkit once, and forks for each command.

`spmdkit` and `python` in `bin` are clients of the server: they pass their arguments, environment, folder and three
streams, forward signals, and exit as the forked process does. A killed client kills the process. What Python or JAX
reads at its start, such as `python -c` and other JAX variables, starts a real process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

from tests.support import compile_cache
from tests.support.forks import SERVERS, start_forked

JAX_NUMBERS = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_NUM_CPU_DEVICES", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT")
"""Variables of JAX that a forked process applies."""
IMPORTED = (
    "jaxlib.mlir.dialects.mhlo",
    "jaxlib.triton.dialect",
    "spmdkit.checkpoint.orbax_backend",
    "spmdkit.data.grain_reader",
    "spmdkit.plan.command",
    "spmdkit.plan.machine.calibrate",
    "spmdkit.program.replica_check",
    "spmdkit.run.loop",
    "spmdkit.tools.drill.command",
    "spmdkit.verify.external_step",
)
"""Modules that most commands import later."""
SET_BY_SPMDKIT = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"

_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

command = os.path.basename(sys.argv[0])
words = ["-m", "spmdkit", *sys.argv[1:]] if command == "spmdkit" else sys.argv[1:]
others = {{k: v for k, v in os.environ.items() if k.startswith(("JAX_", "PYTHON")) and k not in {applied}}}
if not words or not (words[0].endswith(".py") or words[0] == "-m") or others != {others}:
    os.execv({python!r}, [{python!r}, *words])
pid, pending = None, []
def forward(number, _):
    pending.append(number) if pid is None else os.kill(pid, number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, forward)
server = socket.socket(socket.AF_UNIX)
server.connect({socket!r})
ignored = [n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_IGN]
request = json.dumps({{"words": words, "folder": os.getcwd(), "env": dict(os.environ), "ignored": ignored}})
socket.send_fds(server, [request[:1000].encode()], [0, 1, 2])
server.sendall(request[1000:].encode() + b"\\n")
replies = server.makefile()
pid = int(replies.readline())
for number in pending:
    os.kill(pid, number)
code = int(replies.readline() or -signal.SIGKILL)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class WarmProcesses:
    """The server, as a context manager. `bin`: the folder of its clients."""

    def __enter__(self) -> WarmProcesses:
        tests = ("SPMDKIT_", "JAX_", "XLA_", "PYTEST", "NPROC")
        env = {name: value for name, value in os.environ.items() if not name.startswith(tests)}
        env["JAX_PLATFORMS"] = "cpu"
        self.bin = Path(tempfile.mkdtemp(prefix="spmdkit-bin-"))
        applied = (*JAX_NUMBERS, SET_BY_SPMDKIT)
        others = {k: v for k, v in env.items() if k.startswith(("JAX_", "PYTHON")) and k not in applied}
        address = str(self.bin / "socket")
        text = _CLIENT.format(python=sys.executable, applied=applied, others=others, socket=address)
        for name in ("spmdkit", "python"):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o700)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(64)
        with listener:
            self._server = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), str(self.bin / "python")],
                cwd=Path(__file__).parents[2],
                env=env | {SET_BY_SPMDKIT: "1", compile_cache.FOLDER: os.environ[compile_cache.FOLDER]},
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        SERVERS.add(self._server.pid)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        SERVERS.remove(self._server.pid)
        self._server.communicate()
        shutil.rmtree(self.bin)


# ---- the server


def _serve(listener: socket.socket) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    from spmdkit.cli import _command
    from spmdkit.foundation import plugins
    from spmdkit.metrics.environment import package_versions
    from spmdkit.program.source_digest import package_digests

    compile_cache.CompileCache()
    for cached in (_command, plugins._entry_points, package_digests, package_versions):
        cached()  # once instead of in each process
    gc.collect()
    gc.freeze()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}
    while True:
        for key, _ in selector.select(0.01 if running else None):
            if key.fileobj is sys.stdin:
                return  # the tests have ended
            if key.fileobj is listener:
                client, _ = listener.accept()
                pid = _start(client)
                client.sendall(f"{pid}\n".encode())
                running[pid] = client
                selector.register(client, selectors.EVENT_READ, pid)
            else:  # the client was killed
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(key.data, signal.SIGKILL)
                selector.unregister(key.fileobj)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                client = running.pop(pid)
                with contextlib.suppress(OSError):
                    client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                with contextlib.suppress(KeyError):
                    selector.unregister(client)
                client.close()


def _start(client: socket.socket) -> int:
    """Returns the id of a process forked for a client."""
    first, descriptors, *_ = socket.recv_fds(client, 1 << 16, 3)
    with client.makefile("rb") as rest:
        request = first if first.endswith(b"\n") else first + rest.readline()
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    code = 99
    try:
        os.setsid()
        client.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        code = _run(json.loads(request))
    finally:
        os._exit(code)


def _run(request: dict[str, Any]) -> int:
    """Runs a module or a script as `python` does, and returns its exit code."""
    import jax

    from spmdkit.launch import local

    compile_folder = os.environ[compile_cache.FOLDER]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # exits with the server
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"] | {compile_cache.FOLDER: compile_folder})
    tempfile.tempdir = None  # TMPDIR is read once
    for name in JAX_NUMBERS:
        if name in os.environ:
            jax.config.update(name.lower(), int(os.environ[name]))
    compile_cache.use(os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1")
    sys.executable = sys.argv[2]  # commands that start a command
    local._start = start_forked
    warnings.filterwarnings("ignore", module="runpy")  # the module is imported already
    words = request["words"]
    code = 0
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], request["folder"]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as request_to_exit:
        code = request_to_exit.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        code = code if isinstance(code, int) else int(code is not None)
    except BaseException:  # noqa: BLE001 - as python does
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
