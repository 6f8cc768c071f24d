"""`launch`: several processes of one command on this machine, as one: one output, one Ctrl-C, one exit code.

Each concern is a function: what a process is told (`child_environment`), how it is started (`_start`), how its output
comes out (`_copy`), when the others must end (`_Supervisor`), who is to blame (`cause.py`). Hosts, schedulers and
restarts are other ways to start and other policies over the same parts.

Guarantees: no child outlives the launcher, not even a `kill -9` of it (PR_SET_PDEATHSIG, Linux); when a process fails,
all are gone about two seconds later; everything listens on the loopback interface only.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, TextIO

from spmdkit.cluster.environment import COORDINATOR, DEVICES_PER_PROCESS, NUM_PROCESSES, PROCESS_ID
from spmdkit.errors import ConfigError
from spmdkit.faults.exceptions import ERROR_FILE
from spmdkit.launch.cause import PREEMPTED, Exit, cause

POLL_S = 0.05
# After the first failure the others get this long to write down their own errors, and then this long to go.
COLLECT_S = 0.5
FAILED_GRACE_S = 1.0
PR_SET_PDEATHSIG = 1
TAIL_LINES = 20
# Gloo greets on standard output for every group of processes; not for people.
NOISE = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\.")


@dataclass
class Child:
    """One started process. Its number in the cluster, its error file, and the last lines that it wrote to stderr."""

    process: int
    popen: subprocess.Popen[bytes]
    error_file: Path
    exit: Exit | None = None
    told_to_end: bool = False
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    readers: list[threading.Thread] = field(default_factory=list)


def launch(
    command: list[str],
    num_processes: int,
    devices_per_process: int | None = None,
    env: Mapping[str, str] = os.environ,
    grace_s: float = 15.0,
) -> int:
    """Returns the exit code of `num_processes` copies of `command`: 0, or that of the first to fail.

    `grace_s` is how long processes may take to save and leave after SIGINT or SIGTERM came to the launcher. The second
    signal kills them. To be called from the main thread, before other threads are started.
    """
    if num_processes < 1:
        raise ConfigError(f"launch -n {num_processes}: at least one process is needed. Try -n 2.")
    if devices_per_process is not None and devices_per_process < 1:
        raise ConfigError(f"--devices-per-process {devices_per_process}: at least one device. Try 1.")
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="spmdkit-launch-") as folder, _queued_signals() as signals:
        coordinator = f"127.0.0.1:{_free_port()}"
        try:
            for process in range(num_processes):
                error_file = Path(folder) / f"error-{process}.json"
                child_env = child_environment(env, coordinator, num_processes, process, devices_per_process, error_file)
                children.append(Child(process, _start(command, child_env), error_file))
            lock = threading.Lock()
            for child in children:
                _copy_output(child, lock)
            asked = _Supervisor(children, signals, grace_s).run()
        finally:
            _end(children)
    first = cause([child.exit for child in children if child.exit is not None])
    if first is None:
        return 0
    if first.ended_by_us and asked is not None:
        print(f"{num_processes} processes were killed after signal {asked}", file=sys.stderr, flush=True)
        return 128 + asked
    _explain(first, children[first.process])
    return first.code


def child_environment(
    env: Mapping[str, str],
    coordinator: str,
    num_processes: int,
    process: int,
    devices_per_process: int | None,
    error_file: Path,
) -> dict[str, str]:
    """Returns the environment of one process: the given one and its place in the cluster."""
    told = {
        COORDINATOR: coordinator,
        NUM_PROCESSES: str(num_processes),
        PROCESS_ID: str(process),
        ERROR_FILE: str(error_file),
        "PYTHONUNBUFFERED": "1",
    }
    if devices_per_process is not None:
        told[DEVICES_PER_PROCESS] = str(devices_per_process)
    if any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy") for name in env):
        # gRPC would send even loopback through a proxy.
        others = [env[name] for name in ("no_proxy", "NO_PROXY") if env.get(name)]
        told["no_proxy"] = told["NO_PROXY"] = ",".join(["127.0.0.1", "localhost", *others[:1]])
    return {**env, **told}


def _start(command: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts one process in a session of its own: a Ctrl-C reaches only the launcher, and the group can be killed."""
    return subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_die_with(os.getpid()),
    )


def _die_with(launcher: int) -> Callable[[], None] | None:
    """Returns what the child runs before `exec` so that the kernel kills it when the launcher dies (Linux)."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def bind() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != launcher:  # it died in between, and nobody would tell
            os._exit(128 + signal.SIGKILL)

    return bind


def _free_port() -> int:
    """Returns a port that was free a moment ago; process 0 says so plainly when it no longer is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def _queued_signals() -> Iterator[deque[int]]:
    """SIGINT and SIGTERM are collected for the supervisor instead of ending the launcher."""
    received: deque[int] = deque()

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _copy_output(child: Child, lock: threading.Lock) -> None:
    """Starts two threads that copy the child's lines to ours, each with its process number in front."""
    streams = ((child.popen.stdout, sys.stdout, None), (child.popen.stderr, sys.stderr, child.tail))
    for source, target, tail in streams:
        assert source is not None
        thread = threading.Thread(target=_copy, args=(source, target, f"[{child.process}] ", lock, tail), daemon=True)
        thread.start()
        child.readers.append(thread)


def _copy(source: IO[bytes], target: TextIO, prefix: str, lock: threading.Lock, tail: deque[str] | None) -> None:
    readable = True
    for raw in iter(source.readline, b""):
        line = raw.decode(errors="replace").rstrip("\r\n")
        if NOISE.match(line):
            continue
        if tail is not None:
            tail.append(line)
        if not readable:
            continue  # our reader is gone; the child must still not block on a full pipe
        with lock:
            try:
                target.write(f"{prefix}{line}\n")
                target.flush()
            except (OSError, ValueError):
                readable = False


class _Supervisor:
    """Waits for all children, and decides when the rest of them must end."""

    def __init__(
        self,
        children: list[Child],
        signals: deque[int],
        grace_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._children, self._signals, self._grace_s = children, signals, grace_s
        self._clock, self._sleep = clock, sleep
        self._asked: int | None = None
        self._term_at = self._kill_at = float("inf")
        self._num_exits = 0

    def run(self) -> int | None:
        """Returns when every child is dead: the first signal that the launcher received, or None."""
        while any(child.exit is None for child in self._children):
            self._take_signals()
            self._take_exits()
            now = self._clock()
            if now >= self._kill_at:
                self._send_all(signal.SIGKILL)
            elif now >= self._term_at:
                self._term_at = float("inf")
                self._send_all(signal.SIGTERM)
            self._sleep(POLL_S)
        return self._asked

    def _take_signals(self) -> None:
        while self._signals:
            number = self._signals.popleft()
            if self._asked is not None:
                self._kill_at = self._clock()
                continue
            self._asked = number
            self._kill_at = min(self._kill_at, self._clock() + self._grace_s)
            for child in self._children:
                if child.exit is None:
                    _send(child, number)

    def _take_exits(self) -> None:
        for child in self._children:
            if child.exit is not None:
                continue
            status = _status(child.popen.pid)
            if status is None:
                continue
            message, when = _read_error(child.error_file)
            child.exit = Exit(child.process, status, self._num_exits, child.told_to_end, message, when)
            self._num_exits += 1
            self._limit_the_others(child.exit)

    def _limit_the_others(self, exit: Exit) -> None:
        """A stop that all agreed on leaves time to save; after a failure nobody can finish anything."""
        now = self._clock()
        stopping = exit.code == PREEMPTED or (
            self._asked is not None and exit.code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        )
        if stopping:
            self._kill_at = min(self._kill_at, now + self._grace_s)
        elif exit.code != 0:
            self._term_at = min(self._term_at, now + COLLECT_S)
            self._kill_at = min(self._kill_at, now + COLLECT_S + FAILED_GRACE_S)

    def _send_all(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.exit is None:
                child.told_to_end = True
                _send(child, number)


def _status(pid: int) -> int | None:
    """Returns the exit status (negative for a signal), or None while it runs. The dead stay zombies until `_end`.

    So their group's number is not given to anybody else before the group is killed.
    """
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _send(child: Child, number: int) -> None:
    """Sends to the process; KILL goes to its whole group, so that its own children go too."""
    try:
        if number == signal.SIGKILL:
            os.killpg(child.popen.pid, number)
        else:
            os.kill(child.popen.pid, number)
    except ProcessLookupError:
        return  # it ended in this moment


def _end(children: list[Child]) -> None:
    """Kills what is left of every group, reaps, and lets the output run out."""
    for child in children:
        _send(child, signal.SIGKILL)
    for child in children:
        child.popen.wait()
    for child in children:
        for thread in child.readers:
            thread.join(timeout=1.0)


def _read_error(path: Path) -> tuple[str | None, float]:
    """Returns (message, time) that the process wrote before it left, or (None, 0)."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return str(record["message"]), float(record.get("time", 0.0))
    except (OSError, ValueError, KeyError, TypeError):
        return None, 0.0


def _explain(first: Exit, child: Child) -> None:
    """Prints, as the last thing, what the process said that is to blame."""
    if first.code == PREEMPTED:
        line = f"process {first.process} stopped on request with exit code {first.code}"
    elif first.status < 0:
        name = signal.Signals(-first.status).name if -first.status in set(signal.Signals) else f"signal {-first.status}"
        line = f"process {first.process} failed first: ended by {name} (exit code {first.code})"
    else:
        line = f"process {first.process} failed first with exit code {first.code}"
    said = first.message or ("" if first.code == PREEMPTED else "\n".join(child.tail))
    print(f"{line}{':' if said else ''}\n{said}".rstrip(), file=sys.stderr, flush=True)
