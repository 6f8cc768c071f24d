"""Policies over running processes: when the rest must end after one has failed, stopped, or the user asked to stop."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from spmdkit.attempt import last_step
from spmdkit.errors import ExitCode
from spmdkit.launch.cause import Exit
from spmdkit.launch.output import Output
from spmdkit.launch.process import exit_status, send

POLL_S = 0.05
# After the first failure the others get this long to write down their own errors, and then this long to go.
COLLECT_S = 0.5
FAILED_GRACE_S = 1.0


@dataclass
class Child:
    """One started process, the leader of a session: its number in the cluster, its error file, how it ended."""

    process: int
    popen: subprocess.Popen[bytes]
    error_file: Path
    output: Output | None = None
    exit: Exit | None = None
    told_to_end: bool = False


@contextmanager
def queued_signals() -> Iterator[deque[int]]:
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


class Supervisor:
    """Waits for all children, and decides when the rest of them must end."""

    def __init__(
        self,
        children: Sequence[Child],
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
                    send(child.popen.pid, number)

    def _take_exits(self) -> None:
        for child in self._children:
            if child.exit is not None:
                continue
            status = exit_status(child.popen.pid)
            if status is None:
                continue
            message, when = _read_error(child.error_file)
            if status == 0 and (left := _left_at_work(child)):
                status, message, when = int(ExitCode.FAILED), left, time.time()
            child.exit = Exit(child.process, status, self._num_exits, child.told_to_end, message, when)
            self._num_exits += 1
            self._limit_the_others(child.exit)

    def _limit_the_others(self, exit: Exit) -> None:
        """A stop that all agreed on leaves time to save; after a failure nobody can finish anything."""
        now = self._clock()
        stopping = exit.code == ExitCode.PREEMPTED or (
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
                send(child.popen.pid, number)


def end(children: Sequence[Child]) -> None:
    """Kills what is left of every group, reaps, and lets the output run out."""
    for child in children:
        send(child.popen.pid, signal.SIGKILL)
    for child in children:
        child.popen.wait()
    for child in children:
        if child.output is not None:
            child.output.run_out()


def _left_at_work(child: Child) -> str:
    """Returns what to say of a process that left with code 0 while its own record says that it runs, or an empty string."""
    try:
        if not json.loads(child.error_file.read_text(encoding="utf-8")).get("running"):
            return ""
    except (OSError, ValueError, AttributeError):
        return ""  # no command of ours, or one that has not begun
    step = last_step(child.error_file.with_name(f"{child.error_file.name}.step"))
    return (
        f"process {child.process} left with exit code 0 {'before its first step' if step is None else f'at step {step}'}, and its work was not done. "
        "A command of spmdkit returns when it is. Look for os._exit in the task and in what it imports, and raise an error there."
    )


def _read_error(path: Path) -> tuple[str | None, float]:
    """Returns (message, time) that the process wrote before it left, or (None, 0)."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return str(record["message"]), float(record.get("time", 0.0))
    except (OSError, ValueError, KeyError, TypeError):
        return None, 0.0
