"""Decides when the remaining processes must end: after one has failed or stopped, or after a stop request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from spmdkit.errors import ExitCode
from spmdkit.foundation.clock import RunningClock
from spmdkit.foundation.constants import NAMELESS
from spmdkit.foundation.run_status import step_of
from spmdkit.foundation.timeouts import ERROR_COLLECT_S, FAILED_GRACE_S, LAUNCH_POLL_S, SILENT_PROCESS_S, STACKS_WRITE_S
from spmdkit.launch.output import Output
from spmdkit.launch.process import exit_status, handles, is_stopped, print_line, send
from spmdkit.launch.root_cause import Exit, describe_status


class ReportFile:
    """An unnamed file in which a process reports to the launcher. The process inherits its open descriptor."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  it lasts as long as the process that writes into it
        self.descriptor = self._file.fileno()
        self.path = f"{NAMELESS}{self.descriptor}"  # the path in the process

    def read(self) -> bytes:
        # A buffer of the largest size for each read fragments glibc's heap (2026-11-28).
        return os.pread(self.descriptor, min(MAX_NOTE_BYTES, os.fstat(self.descriptor).st_size), 0)

    def write(self, text: str) -> None:
        """Overwrites the content from the beginning; `text` must not be shorter than the content."""
        os.pwrite(self.descriptor, text.encode(), 0)

    def close(self) -> None:
        self._file.close()


MAX_NOTE_BYTES = 1 << 20


@dataclass
class Child:
    """One started process, the leader of a session: its number in the cluster, its reports, how it ended."""

    process: int
    popen: subprocess.Popen[bytes]
    errors: ReportFile  # why it ended
    beats: ReportFile  # its heartbeats: Python runs in it
    step: ReportFile  # the last step that it dispatched
    output: Output | None = None
    exit: Exit | None = None
    ended_by_us: bool = False
    beat: bytes = b""  # its last heartbeat
    last_beat: Mapping[str, Any] | None = None  # parsed: the phase, and the limit of the time without Python
    last_beat_time: float = 0.0  # when that arrived, by the launcher's running clock
    hang: str | None = None  # the launcher's message about it, if its interpreter is blocked
    is_removed: bool = False  # it is dead, and the others continue without it (membership.py)

    @property
    def is_standby(self) -> bool:
        return self.process < 0


STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""Signals that make all processes save and stop; SIGUSR1 is Slurm's notice."""


REPORTING = tuple(getattr(signal, name) for name in ("SIGQUIT", "SIGTSTP") if hasattr(signal, name))
"""Signals that end nothing: SIGQUIT prints the stacks of all processes, SIGTSTP (Ctrl-Z) pauses them until SIGCONT."""


@contextmanager
def queued_signals() -> Iterator[deque[int]]:
    """Collects signals, which would otherwise end the launcher. Ignored ones stay ignored (`nohup`)."""
    received: deque[int] = deque()

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    handled = [number for number in (*STOPPING, *REPORTING) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, receive) for number in handled}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Supervisor:
    """Waits for all children, and decides when the remaining ones must end."""

    def __init__(
        self,
        children: Sequence[Child],  # one shared list; newcomers may be added to it
        signals: deque[int],
        grace_s: float,
        deaths: ReportFile | None = None,
        on_poll: Callable[[], None] = lambda: None,
    ):
        self._children, self._signals, self._grace_s = children, signals, grace_s
        self._deaths, self.on_poll = deaths, on_poll
        self.continues: Callable[[Child], bool] = lambda child: False  # whether the others continue without a dead one
        self.members: Callable[[], Sequence[int]] = lambda: range(len(children))  # the process of each rank
        self._dead: dict[int, dict[str, Any]] = {}
        self._stop_signal: int | None = None
        self._term_at = self._kill_at = float("inf")
        self._num_exits = 0
        self._running = RunningClock(time.monotonic)

    def run(self) -> int | None:
        """Returns when every child is dead, with the first signal that the launcher received, or None."""
        while any(child.exit is None for child in self._children):
            self.on_poll()
            self._forward_signals()
            self._check_heartbeats()
            self._check_exits()
            now = time.monotonic()
            if now >= self._kill_at:
                self._send_all(signal.SIGKILL)
            elif now >= self._term_at:
                self._term_at = float("inf")
                self._send_all(signal.SIGTERM)
            time.sleep(LAUNCH_POLL_S)
        return self._stop_signal

    def _forward_signals(self) -> None:
        while self._signals:
            number = self._signals.popleft()
            if number in REPORTING:
                self._print_stacks() if number == signal.SIGQUIT else self._pause()
                continue
            if self._stop_signal is not None:
                self._kill_at = time.monotonic()
                continue
            self._stop_signal = number
            self._kill_at = min(self._kill_at, time.monotonic() + self._grace_s)
            for child in self._children:
                if child.exit is None:
                    send(child.popen.pid, number)

    def _print_stacks(self) -> None:
        """Requests the stacks of all threads from each process that has a handler: SIGQUIT would end the others."""
        alive = [child for child in self._children if child.exit is None]
        handling = [child for child in alive if handles(child.popen.pid, signal.SIGQUIT)]
        for child in handling:
            send(child.popen.pid, signal.SIGQUIT)
        if without := [str(child.process) for child in alive if child not in handling]:
            print_line(f"process {', '.join(without)} prints no stacks: it has no handler of SIGQUIT (yet)")

    def _pause(self) -> None:
        """Stops all processes and then the launcher. When a shell's `fg` continues the launcher, so do they."""
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for child in self._children:
                if child.exit is None:
                    send(child.popen.pid, number)
            if number == signal.SIGSTOP:
                os.kill(os.getpid(), number)

    def _check_heartbeats(self) -> None:
        """Ends a process in which no Python has run for longer than allowed, unless it is stopped."""
        now = self._running.tick()
        for child in self._children:
            beat = child.beats.read()
            if beat != child.beat:
                child.last_beat_time, child.beat = now, beat
                with suppress(ValueError):  # half written: the next one follows shortly
                    child.last_beat = json.loads(beat)
            elif child.last_beat is not None:
                limit_s = child.last_beat["interpreter_timeout_s"]
                if limit_s is not None and now - child.last_beat_time > limit_s:
                    self._kill_hung(child)

    def _kill_hung(self, child: Child) -> None:
        """Requests the stacks of a process with a blocked interpreter, which its C handler writes, and kills it."""
        if child.exit is not None or child.hang is not None or child.last_beat is None or is_stopped(child.popen.pid):
            return
        silent_s = self._running.now - child.last_beat_time
        child.hang = (
            f"process {child.process} runs no Python since {silent_s:.0f} s: code in C holds the interpreter. It was "
            f"{child.last_beat['does']} at step {child.last_beat['step']}; its stacks are above. Code that takes long "
            "in C has to release the interpreter; a longer limit is watchdog.interpreter_timeout_s."
        )
        send(child.popen.pid, signal.SIGQUIT)
        time.sleep(STACKS_WRITE_S)
        send(child.popen.pid, signal.SIGKILL)

    def _check_exits(self) -> None:
        for child in list(self._children):
            if child.exit is not None:
                continue
            status = exit_status(child.popen.pid)
            if status is None:
                continue
            report = _report(child.errors, self.members())
            if child.hang is not None:
                code = int(ExitCode.HANG)
                child.exit = Exit(child.process, status, self._num_exits, message=child.hang, assigned_code=code)
            else:
                if status == 0 and (message := _unfinished_message(child)):
                    status, report = int(ExitCode.FAILED), {"message": message, "time": time.time()}
                child.exit = Exit(child.process, status, self._num_exits, child.ended_by_us, **report)
            self._num_exits += 1
            child.is_removed = self._stop_signal is None and self._kill_at == float("inf") and self.continues(child)
            if child.is_removed:
                send(child.popen.pid, signal.SIGKILL)  # the remaining processes of its group
                child.popen.wait()
                continue
            self._report_death(child.exit)
            self._limit_others(child.exit)
            if child.exit.code == ExitCode.PEER_LOST:
                for other in (c for c in self._children if c.process in child.exit.blamed and c.exit is None):
                    if self._running.now - other.last_beat_time > SILENT_PROCESS_S:  # reported missing, sends no beats
                        self._kill_hung(other)
                        other.ended_by_us = True
                        send(other.popen.pid, signal.SIGKILL)  # a stopped process receives no other signal

    def _report_death(self, exit: Exit) -> None:
        """Notifies the others immediately that a process died, and how. They cannot continue, and exit with this
        reason."""
        if self._deaths is None or exit.code in (0, ExitCode.PREEMPTED):
            return
        message = exit.message.splitlines()[0][:500] if exit.message else describe_status(exit)
        members = list(self.members())
        rank = members.index(exit.process) if exit.process in members else exit.process
        self._dead[rank] = {"exit": exit.code, "message": message}
        self._deaths.write(json.dumps(self._dead))

    def _limit_others(self, exit: Exit) -> None:
        """Limits the remaining time of the others: to save after an agreed stop, to exit after a failure."""
        now = time.monotonic()
        signalled = self._stop_signal is not None and exit.code in [128 + number for number in STOPPING]
        if exit.code == ExitCode.PREEMPTED or signalled:
            self._kill_at = min(self._kill_at, now + self._grace_s)
        elif exit.code != 0:
            self._term_at = min(self._term_at, now + ERROR_COLLECT_S)
            self._kill_at = min(self._kill_at, now + ERROR_COLLECT_S + FAILED_GRACE_S)

    def end_all(self) -> None:
        self._kill_at = time.monotonic()

    def _send_all(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.exit is None:
                child.ended_by_us = True
                send(child.popen.pid, number)


def end(children: Sequence[Child]) -> None:
    """Kills the remaining processes of every group, reaps them, and copies the remaining output."""
    for child in children:
        if not child.is_removed:  # its number may belong to another process by now
            send(child.popen.pid, signal.SIGKILL)
    for child in children:
        child.popen.wait()
    for child in children:
        if child.output is not None:
            child.output.drain()
        for note in (child.errors, child.beats, child.step):
            note.close()


def _unfinished_message(child: Child) -> str:
    """Returns a message for a process that ended with exit code 0 while its record is unfinished, or an empty text."""
    try:
        if not json.loads(child.errors.read()).get("running"):
            return ""
    except (ValueError, AttributeError):
        return ""  # not an spmdkit command, or not started yet
    step = step_of(child.step.read())
    return (
        f"process {child.process} ended with exit code 0 "
        f"{'before its first step' if step is None else f'at step {step}'}, and its work was not done. "
        "A command of spmdkit returns when it is. Look for os._exit in the task and in what it imports, and raise an "
        "error there."
    )


def _report(errors: ReportFile, members: Sequence[int]) -> dict[str, Any]:
    """Returns the report that the process wrote before it exited: its message, the time, and the processes at fault."""
    try:
        record = json.loads(errors.read())
        ranks = [int(rank) for rank in record.get("blamed", ())]
        blamed = tuple(members[rank] if rank < len(members) else rank for rank in ranks)
        return {"message": str(record["message"]), "time": float(record.get("time", 0.0)), "blamed": blamed}
    except (ValueError, KeyError, TypeError):
        return {}
