"""The watchdog: every process sends a heartbeat per second and monitors all others. It reports and ends a stalled job.

| symptom                                            | code | process in the report                            |
| -------------------------------------------------- | ---- | ------------------------------------------------ |
| no beat of a process for `heartbeat_timeout_s`     | 75   | the silent one                                   |
| no response of the store for `heartbeat_timeout_s` | 75   | process 0's machine, or the launcher's           |
| the store's process has ended                      | 75   | the coordination service                         |
| a process exited with an error                     | 75   | that one, with the first line of its message     |
| heartbeats, but a phase exceeds its limit          | 76   | the one that works; in the step, the last one    |
| a blocked interpreter: no Python thread runs       | 76   | by the launcher; alone faulthandler ends it, 1   |

Heartbeats are sent through the coordination service's store. One thread accesses the store, and may hang with process
0's machine. A second thread monitors, and never blocks; its clock excludes pauses. Before exit 76 all processes write
their Python stacks to the store, and one process prints all of them. JAX's own heartbeat never decides: it uses wall
time.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from spmdkit.errors import ExitCode, SpmdkitError
from spmdkit.faults import exit_handler, sockets, stacks
from spmdkit.faults.heartbeat import (
    STEP,
    Beat,
    Limits,
    OneSidedHooks,
    Stragglers,
    blocking_processes,
    find_silent,
    from_text,
    hang_report,
    to_text,
)
from spmdkit.faults.launcher_channel import launcher_of
from spmdkit.foundation import phase
from spmdkit.foundation.clock import RunningClock
from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.timeouts import (
    HANG_SUSPECT_S,
    HEARTBEAT_INTERVAL_S,
    LEADER_EXIT_S,
    OWN_ERROR_S,
    OWN_EXIT_S,
    SHARED_ERROR_S,
    STACKS_GATHER_S,
    WATCHDOG_TICK_S,
)

FEW = 64
"""Up to this many processes, each sends a beat per second; with more, the interval grows, since all read all beats."""
SIGNALLED = 128
AGREED = (ExitCode.NOT_WRITTEN, ExitCode.NOT_FINITE, ExitCode.CONFIG, ExitCode.CHECKPOINT)
FOLLOWED = (ExitCode.PEER_LOST, SIGNALLED + signal.SIGABRT)
"""Exit codes of a process that lost a peer, from its report or from JAX's abort: not the root cause."""


class Board(Protocol):
    """The interface of a cluster that the watchdog uses: strings by key that all processes see."""

    def put(self, key: str, value: str, overwrite: bool = False) -> None: ...

    def entries(self, folder: str) -> dict[str, str]: ...


class Watchdog:
    """Monitors this process and, if there are several, all processes; `watching` starts and stops it.

    Args:
        board, folder: the store that the processes share; None: there is one process.
        heartbeat_timeout_s: a process without a heartbeat for this time is lost.
        interpreter_timeout_s: a process in which no Python runs for this time is ended; None: never.
        hook_timeout_s: a process in a hook for this time after another has left the hook blocks the job.
        exit_process: ends the process.
    """

    def __init__(
        self,
        board: Board | None,
        folder: str,
        process: int,
        num_processes: int,
        limits: Limits,
        *,
        heartbeat_timeout_s: float,
        interpreter_timeout_s: float | None,
        hook_timeout_s: float = 60.0,
        exit_process: Callable[[int], Any] = exit_handler.exit_process,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._board, self._folder, self._me, self._num = board, folder, process, num_processes
        self._limits, self._heartbeat_timeout_s = limits, heartbeat_timeout_s
        self._interpreter_timeout_s = interpreter_timeout_s
        self._exit_process, self.clock = exit_process, RunningClock(clock)  # this clock excludes pauses
        self._beat_s = HEARTBEAT_INTERVAL_S * max(1.0, num_processes / FEW)
        self.step_s: float | None = None  # duration of a typical step, None before it is known
        self.record_end: Callable[[int, str, str], Any] = lambda code, message, stacks: None  # writes the run's records
        self.newest: Callable[[], str] = lambda: ""  # a sentence about the newest checkpoint
        self.notices: list[str] = []  # lines for the log
        self._main = threading.get_ident()
        self._place = phase.current_phase()
        self._since = 0.0
        self._passed = 0, 0.0  # hooks passed, and when that changed
        # Values that one thread writes and the other reads are replaced, never mutated.
        self._seen: Mapping[int, tuple[float, Beat]] = {}  # by running time
        self._alarm: dict[str, Any] | None = None
        self._exits: Mapping[int, tuple[float, dict[str, Any]]] = {}
        self._exchange_since: float | None = None
        self._service_is_lost = False
        self._number, self._sent_at = 0, -self._beat_s  # number and send time of the last heartbeat
        self._sent_overdue = False  # whether the last heartbeat was past the limit of its phase
        self._stamps: dict[int, str] = {}
        self._stragglers, self._one_sided_hooks = Stragglers(), OneSidedHooks(hook_timeout_s)
        self._last_beat, self._mistakes = -HEARTBEAT_INTERVAL_S, 0
        self._on_stop: Any = None  # the previous handler of SIGTSTP
        self._stopped = threading.Event()
        self._mine = self._beat()
        self._threads = [threading.Thread(target=self._watch, name="spmdkit-watch", daemon=True)]
        if board is not None and num_processes > 1:
            self._threads.append(threading.Thread(target=self._exchange_loop, name="spmdkit-beat", daemon=True))
        self._launcher = launcher_of(os.environ)

    # ---- start and stop ----

    def start(self) -> None:
        exit_handler.exit_callbacks.append(self.announce_exit)
        if self._guards_interpreter and threading.current_thread() is threading.main_thread():
            self._on_stop = signal.signal(signal.SIGTSTP, stacks.suspend)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends both threads. Must be called before the processes disconnect; may be called twice."""
        self._stopped.set()
        with suppress(ValueError):
            exit_handler.exit_callbacks.remove(self.announce_exit)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(2 * WATCHDOG_TICK_S + 1.0)
        if self._guards_interpreter:
            faulthandler.cancel_dump_traceback_later()
        if self._on_stop is not None:
            signal.signal(signal.SIGTSTP, self._on_stop)
            self._on_stop = None
        if self._launcher is not None:
            self._launcher.close()

    @property
    def _guards_interpreter(self) -> bool:
        return self._interpreter_timeout_s is not None and self._launcher is None and exit_handler.owns_process()

    def report_service_lost(self) -> bool:
        """Ends this process with 75, since the coordination service has ended. Called in any thread. Returns False if
        the watchdog is stopped."""
        self._service_is_lost = True
        return not self._stopped.is_set()

    def take_notices(self) -> list[str]:
        notices, self.notices = self.notices, []
        return notices

    # ---- monitoring thread ----

    def _watch(self) -> None:
        while not self._stopped.wait(WATCHDOG_TICK_S):
            now = self.clock.tick()
            self._mine = self._beat()
            if self._launcher is not None:
                self._launcher.write_beat(self._mine, self._interpreter_timeout_s)
                self._record_exits({p: report for p, report in self._launcher.dead().items() if p != self._me})
            if now - self._last_beat >= HEARTBEAT_INTERVAL_S:
                self._last_beat = now
                if self._guards_interpreter:
                    stacks.restart_exit_timer(self._interpreter_timeout_s or 0.0)
            try:
                if self._me == 0 and self._num > 1:
                    self.notices += self._stragglers.update(now, {p: b.spent for p, b in self._beats().items()})
                self._judge(now)
            except Exception as error:  # noqa: BLE001  a bug here must end neither the watchdog nor the run; printed once
                if not self._mistakes:
                    traceback.print_exception(error)
                self._mistakes += 1

    def _beat(self) -> Beat:
        place, now = phase.current_phase(), self.clock.now
        if place.number != self._place.number:
            self._place, self._since = place, now
        limit = self._limits.of(place.phase, self.step_s)
        hook, passed, requested = phase.current_hook()
        if hook and not requested:
            hook = f"'{hook}'{stacks.user_line(self._main)}"
        if passed != self._passed[0]:
            self._passed = passed, now
        spent, since = dict(phase.seconds_by_phase), now - self._since
        may_wait_for_callback = place.phase in (STEP, phase.WAITING) and since > HEARTBEAT_INTERVAL_S
        callback = stacks.callback_line() if may_wait_for_callback else ""
        passed_s = now - self._passed[1]
        waits = place.phase in (STEP, phase.EVALUATION) and since > HEARTBEAT_INTERVAL_S
        return Beat(
            *(place.phase, place.detail, place.step, since, limit, spent),
            *(hook, passed, callback, passed_s, requested),
            *(waits and stacks.in_jax(self._main), waits and self._num > 1 and sockets.unanswered()),
        )

    def _judge(self, now: float) -> None:
        if self._alarm is not None:
            return self._end(self._alarm)
        causes_first = sorted(self._exits.items(), key=lambda item: item[1][1]["exit"] in FOLLOWED)
        for process, (when, report) in causes_first:
            if now - when > self._patience_s(report["exit"]) and not phase.is_ending(OWN_EXIT_S):
                preempted = report["exit"] == ExitCode.PREEMPTED
                code = int(ExitCode.PREEMPTED if preempted else ExitCode.PEER_LOST)
                return self._end({"code": code, "processes": [process], "why": "exited", **report})
        if lost := self._lost(now):
            return self._end(lost)
        if self._cannot_read(now):
            return
        beats = self._beats()
        quiet = [p for p, (when, _) in self._seen.items() if now - when > HANG_SUSPECT_S + 2 * self._beat_s]
        if blamed := blocking_processes(beats, quiet):
            return self._end({"code": int(ExitCode.HANG), "processes": list(blamed), "why": "hang"})
        if blamed := self._one_sided_hooks.update(now, {p: beat for p, beat in beats.items() if p not in quiet}):
            hook, requested = beats[blamed[0]].hook, beats[blamed[0]].requested
            verdict = {"code": int(ExitCode.HANG), "processes": list(blamed), "why": "hang"}
            self._end({**verdict, "hook": hook, "requested": requested})

    def _patience_s(self, code: int | None) -> float:
        """Returns how long the training thread may take to report its own error after a process exited with `code`."""
        if code is None or code > SIGNALLED:
            return 0.0
        compares = self._mine.step == 0 and code != ExitCode.PREEMPTED  # before the first step, all run the same checks
        return SHARED_ERROR_S if compares or code in AGREED else OWN_ERROR_S

    def _lost(self, now: float) -> dict[str, Any] | None:
        code, since = int(ExitCode.PEER_LOST), self._exchange_since
        if self._service_is_lost:
            return {"code": code, "processes": [], "why": "service"}
        limit_s = max(self._heartbeat_timeout_s, 4 * self._beat_s)
        if self._cannot_read(now):
            is_lost = since is not None and now - since > limit_s
            return {"code": code, "processes": [0], "why": "unreachable"} if is_lost else None
        last_beats = {p: when for p, (when, _) in self._seen.items()}
        silent_processes = find_silent(now, last_beats, (p for p in range(self._num) if p != self._me), limit_s)
        return {"code": code, "processes": silent_processes, "why": "silent"} if silent_processes else None

    def _cannot_read(self, now: float) -> bool:
        """Returns whether no heartbeat can be read, so that no process can be judged."""
        return self._exchange_since is not None and now - self._exchange_since > HANG_SUSPECT_S

    def _beats(self) -> dict[int, Beat]:
        return {p: beat for p, (_, beat) in self._seen.items()} | {self._me: self._mine}

    # ---- store thread ----

    def _exchange_loop(self) -> None:
        while not self._stopped.wait(WATCHDOG_TICK_S * max(1.0, self._num / 8)):
            self._exchange()

    def _exchange(self) -> None:
        assert self._board is not None
        now = self.clock.now
        since = self._exchange_since = now if self._exchange_since is None else self._exchange_since
        try:
            mine = self._mine
            if now - self._sent_at >= self._beat_s or (mine.overdue and not self._sent_overdue):
                self._number, self._sent_overdue = self._number + 1, mine.overdue
                beat = f"{self._number} {to_text(mine)}"
                self._board.put(f"{self._folder}/beat/{self._me}", beat, overwrite=True)
                self._sent_at = now
            entries = self._board.entries(self._folder)
        except Exception:  # noqa: BLE001  process 0 has ended and JAX aborts; or the network failed, which `_lost` detects
            return
        if self.clock.now - since > HANG_SUSPECT_S:  # no heartbeat was readable: all deadlines restart
            self._seen = {p: (self.clock.now, beat) for p, (_, beat) in self._seen.items()}
        self._exchange_since = None
        self._read(entries)

    def _read(self, entries: Mapping[str, str]) -> None:
        now = self.clock.now
        for key, text in entries.items():
            kind, _, process = key.partition("/")
            if kind == "beat" and int(process) != self._me:
                stamp, _, beat = text.partition(" ")  # the beat's number: the process is alive while it changes
                if self._stamps.get(int(process)) != stamp:
                    self._stamps[int(process)] = stamp
                    self._seen = {**self._seen, int(process): (now, from_text(beat))}
            elif kind == "exited" and int(process) != self._me:
                self._record_exits({int(process): json.loads(text)})
        if "alarm" in entries and self._alarm is None:
            self._alarm = json.loads(entries["alarm"])

    def _record_exits(self, left: Mapping[int, dict[str, Any]]) -> None:
        """Records the processes that have exited; the first report of each counts."""
        if left.keys() - self._exits.keys():
            self._exits = {p: (self.clock.now, report) for p, report in left.items()} | dict(self._exits)

    # ---- exit ----

    def announce_exit(self, code: int, message: str) -> None:
        """Notifies the others that this process exits, and why, so that they do not wait for a timeout."""
        if self._stopped.is_set() or self._board is None or self._num == 1:
            return
        self._stopped.set()
        self._report_exit(code, message)
        self._exit_last(SHARED_ERROR_S if code in AGREED else LEADER_EXIT_S)

    def _report_exit(self, code: int, message: str) -> None:
        report = json.dumps({"exit": code, "message": message.splitlines()[0][:500] if message else ""})
        key, board = f"{self._folder}/exited/{self._me}", self._board
        assert board is not None
        _within(OWN_ERROR_S, lambda: board.put(key, report, overwrite=True))

    def _exit_last(self, patience_s: float = LEADER_EXIT_S) -> None:
        from spmdkit import compat

        if self._me != 0 or self._board is None or self._num == 1 or not compat.holds_coordination_service():
            return
        board = self._board
        missed = {int(p) for p in self._alarm["processes"]} if self._alarm else set()
        others = set(range(1, self._num)) - missed
        with suppress(SpmdkitError):
            exited = lambda: others <= {int(p) for p in board.entries(f"{self._folder}/exited")}
            Deadline(patience_s).wait_for(exited, WATCHDOG_TICK_S / 4)
            time.sleep(WATCHDOG_TICK_S / 4)  # they have reported their exit, and exit now

    def _end(self, verdict: dict[str, Any]) -> None:
        """Ends this process: notifies the others, gathers the stacks of all, prints them in one process."""
        exit_handler.taken_over.set()
        self._alarm = verdict
        beats, traces = self._beats(), {self._me: stacks.stacks(self._main)}
        unreachable = verdict["why"] in ("unreachable", "service")
        if self._board is not None and self._num > 1 and not unreachable:
            _within(2 * STACKS_GATHER_S, lambda: self._gather(verdict, beats, traces))
        if self._stopped.is_set():
            exit_handler.taken_over.clear()
            return  # the training thread has ended in the meantime, and exits by itself
        newest = ""
        with suppress(OSError):  # the disk is gone
            newest = self.newest()
        text = hang_report(verdict, beats, newest)
        shown = ""
        if verdict["why"] == "hang" and self._me == min(traces):
            blamed_first = sorted(traces, key=lambda p: (p not in verdict["processes"], p))
            shown = "\n\n".join(f"process {p}, {traces[p]}" for p in blamed_first)
        with suppress(Exception):
            self.record_end(verdict["code"], text, shown)
        # A process without the service may itself be cut off: it names no other, so that another's report counts.
        exit_handler.write_message(verdict["code"], text, [] if unreachable else verdict["processes"], shown)
        self._stopped.set()
        if self._board is not None and self._num > 1 and not unreachable:
            self._report_exit(verdict["code"], text)
            self._exit_last()
        self._exit_process(verdict["code"])

    def _gather(self, verdict: dict[str, Any], beats: dict[int, Beat], traces: dict[int, str]) -> None:
        """Publishes the alarm, and reads the phases and stacks of all others into `beats` and `traces`."""
        board = self._board
        assert board is not None
        with suppress(SpmdkitError):
            if "alarm" not in board.entries(self._folder):
                board.put(f"{self._folder}/alarm", json.dumps(verdict), overwrite=True)
            if verdict["why"] != "hang":
                return
            mine = json.dumps([to_text(self._mine), traces[self._me]])
            board.put(f"{self._folder}/stacks/{self._me}", mine, overwrite=True)
            for _ in Deadline(STACKS_GATHER_S).polls(WATCHDOG_TICK_S / 4):
                for process, text in board.entries(f"{self._folder}/stacks").items():
                    beat, stack = json.loads(text)
                    beats[int(process)], traces[int(process)] = from_text(beat), stack
                if len(traces) == self._num:
                    break


def _within(seconds: float, act: Callable[[], Any]) -> None:
    """Runs `act`, which may hang with process 0, for at most `seconds`."""

    def quietly() -> None:
        with suppress(SpmdkitError):
            act()

    thread = threading.Thread(target=quietly, name="spmdkit-last", daemon=True)
    thread.start()
    thread.join(seconds)


@contextmanager
def run_watchdog(
    options: Any, process: int = 0, num_processes: int = 1, board: Board | None = None, folder: str = "watch"
) -> Iterator[Watchdog | None]:
    """Monitors while the body runs, as the config section `watchdog` specifies; yields None if that is null."""
    phase.begin()
    sees_quit = stacks.install_sigquit()
    watchdog = None
    if options is not None:
        limits = Limits(**{name: getattr(options, name) for name in Limits.__dataclass_fields__})
        others = {
            name: getattr(options, name) for name in ("heartbeat_timeout_s", "interpreter_timeout_s", "hook_timeout_s")
        }
        watchdog = Watchdog(board, folder, process, num_processes, limits, **others)
        watchdog.start()
    try:
        yield watchdog
    except BaseException as error:
        if num_processes > 1 and exit_handler.owns_process():
            raise  # this process exits and notifies the others first; until then it sends heartbeats
        _stop(watchdog, sees_quit, exit_handler.describe(error))
        raise
    _stop(watchdog, sees_quit)


def _stop(watchdog: Watchdog | None, sees_quit: bool, failed: tuple[int, str] | None = None) -> None:
    if watchdog is not None:
        if failed is not None:
            watchdog.announce_exit(*failed)
        watchdog.stop()
    if sees_quit and not exit_handler.owns_process():  # a command prints its stacks until it exits
        stacks.remove_sigquit()
    phase.end()
