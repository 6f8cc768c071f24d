"""`Driver`: observes a job from the launcher's loop, records what each process does, and injects faults one at a time.

A fault at a step or a save is requested in advance, and the process injects it (faults/injection/inject.py). A fault
with a time is injected here. The next fault is requested after the previous one has ended its attempt or was detected.
If a job continues without a lost process (launch/membership.py), one process has several children in one attempt; the
last of them counts.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from spmdkit.checkpoint.location import Location
from spmdkit.errors import ExitCode
from spmdkit.faults.injection.fault import (
    CHECKPOINT_FAULTS,
    CLOCK_STEP_S,
    DETECTION_CODES,
    DETECTION_EVENTS,
    DISK_FULL_BYTES,
    ENDS_ATTEMPT,
    INJECTED_BY_DRILL,
    REQUEST_BYTES,
    RESULT_OFFSET,
    SIGNALS,
    TEMPORARY,
    TEMPORARY_FOR_S,
    Fault,
)
from spmdkit.foundation.constants import DRILL_FILE
from spmdkit.foundation.run_status import step_of
from spmdkit.launch.process import send, virtual_bytes
from spmdkit.launch.root_cause import cause, describe_status
from spmdkit.launch.supervisor import Child, ReportFile
from spmdkit.tools.drill import corrupt, timing
from spmdkit.tools.drill.clock import Clocks
from spmdkit.tools.drill.network import LAUNCHER, Network, host_address
from spmdkit.tools.drill.object_store import ObjectStore
from spmdkit.tools.drill.timeline import Bars, Events, InjectionResult, Start, bar_of
from spmdkit.tools.drill.timing import Moment, Pace


class Driver:
    """An observer of the launcher. Only random faults need `pace` and `steps` (of the run). `checkpoints`: their folder
    if it is not in the run's directory."""

    def __init__(
        self,
        run_dir: Path,
        num_processes: int,
        faults: Sequence[Fault] = (),
        seed: int = 0,
        pace: Pace | None = None,
        steps: int = 0,
        clock: Callable[[], float] = time.monotonic,
        network: Network | None = None,
        checkpoints: Location | None = None,
        store: ObjectStore | None = None,
    ):
        self._checkpoints = run_dir / "checkpoints" if checkpoints is None else checkpoints
        self._run_dir, self._num_processes, self._pace, self._steps = run_dir, num_processes, pace, steps
        self._clock = clock
        self._rng, self._network, self._store = random.Random(seed), network, store
        self._queue = [(fault, turn) for fault in _in_order(faults) for turn in range(1, fault.count + 1)]
        self.num_requested = len(self._queue)
        self.injections: list[InjectionResult] = []
        self.attempts: list[Start] = []
        self.bars = [Bars() for _ in range(num_processes)]
        self.stop_signal: int | None = None
        self.committed: set[int] = set()  # steps that the run has reported as saved, without damaged ones
        self.num_saves = 0
        self.lost_commits: list[tuple[int, int]] = []  # (committed step, the older step from which the run resumed)
        self._events = Events(run_dir)
        self._notes: list[ReportFile] = []  # one for each child of an attempt, in order
        self._between_attempts = True
        self._noted_deaths: list[Child] = []  # lost children with a recorded loss
        self._pending: InjectionResult | None = None
        self._requested: tuple[Child, ReportFile] | None = None  # the child that injects the pending fault
        self._due_at = float("inf")
        self._turn = 0
        self._reached = self._idle = 0
        self._resumed_at = 0  # the step from which the attempt resumes
        self._is_new_attempt = True
        self._service: int | None = None  # the process of the coordination service
        self._clocks = Clocks(num_processes if any(fault.kind == "clock" for fault in faults) else 0)

    # ---- the launcher's calls ----

    def on_service(self, pid: int) -> None:
        self._service = pid

    @property
    def addresses(self) -> tuple[str, str]:
        return ("127.0.0.1", "127.0.0.1") if self._network is None else (host_address(0), LAUNCHER)

    def host(self, process: int) -> AbstractContextManager[None]:
        return nullcontext() if self._network is None else self._network.host(process)

    def process_env(self, process: int) -> tuple[Mapping[str, str], Sequence[int]]:
        if self._between_attempts:
            self._between_attempts, self._is_new_attempt = False, True
            self._close_notes()
            self.attempts.append(Start(self._clock(), newest_before=corrupt.newest(self._checkpoints)))
        if process >= 0:  # not a standby
            self.bars[process].at("start", self._clock())
        note = ReportFile()
        self._notes.append(note)
        return {DRILL_FILE: note.path, **self._clocks.variables(process)}, [note.descriptor]

    def on_poll(self, children: Sequence[Child]) -> None:
        """Records what each process does now, and injects faults that are due."""
        now, attempt = self._clock(), self.attempts[-1]
        all_children, children = children, _current_children(children)
        if len(children) < self._num_processes:
            return
        for child in children:
            beat = child.last_beat or {}
            kind = bar_of(beat.get("phase"))
            if child.exit is not None:
                kind = "left" if child.exit.code in (0, ExitCode.PREEMPTED) else "dead"
            self.bars[child.process].at(kind, now)
        steps = [step_of(child.step.read()) for child in children]
        known = [step for step in steps if step is not None]
        self._read_result(children)  # before the events: a fault and its event may both be newer than the last poll
        self._read_events()
        if attempt.first_step is None and len(known) == len(children) and min(known) > self._resumed_at:
            attempt.first_step = now
        if self._is_new_attempt:
            self._is_new_attempt = False
            self._request_next(all_children, new_attempt=True)
        if self._pending is not None and self._pending.fired is None and self._was_replaced(children):
            self._request_next(all_children, new_attempt=False)
        self._inject_if_due(all_children, now)
        self._reached = max([self._reached, *known])
        self._note_deaths(all_children, now)
        self._note_recovery(children, known, now)
        if self._pending is None:
            self._request_next(all_children, new_attempt=False)

    def on_exit(self, children: Sequence[Child], stop_signal: int | None) -> None:
        """Records the end of an attempt, and damages a checkpoint if that is requested."""
        now, attempt = self._clock(), self.attempts[-1]
        self.stop_signal, self._between_attempts = stop_signal, True
        children = _current_children(children)
        self._read_result(children)
        self._read_events()
        attempt.end = now
        self._restore_outside()
        self._note_end(children, now)
        for injection in self.injections:
            survived = injection.in_process and (injection.recovered is not None or injection.overtaken)
            ends = (injection.fault.kind in ENDS_ATTEMPT or injection.exit_code is not None) and not survived
            if ends and injection.attempt == len(self.attempts):
                injection.reached, injection.unfinished = self._reached, corrupt.unfinished(self._checkpoints)
        newest = corrupt.newest(self._checkpoints)
        self._idle = 0 if newest > attempt.newest_before else self._idle + 1
        done = self._pending
        if done is not None and done.fired is not None:
            if done.fault.kind in CHECKPOINT_FAULTS:
                done.damaged = corrupt.damage(self._checkpoints, done.fault.kind, self._rng)
                self.committed.discard(newest)
                done.failed = done.failed or ("" if done.damaged else "there was no checkpoint yet")
            self._pending = None
        for child in children:
            self.bars[child.process].at("restart", now)
        self._resumed_at = newest

    def close(self) -> None:
        """Ends the timelines."""
        self._close_notes()
        self._clocks.close()
        for bars in self.bars:
            if bars.bars and bars.bars[-1].kind == "restart":
                bars.bars.pop()

    # ---- injecting ---------------------------------------------------------------------------------------------------

    def _request_next(self, children: Sequence[Child], new_attempt: bool) -> None:
        """Requests the next fault; a fault that was not injected in the previous attempt is requested again."""
        injection = self._pending
        if injection is None:
            if not self._queue:
                return
            fault, self._turn = self._queue[0]
            is_random = fault.step is None and fault.seconds is None and fault.phase is None
            if is_random and not new_attempt and self._reached >= self._steps:
                return
            self._queue.pop(0)
            injection = self._pending = InjectionResult(fault, len(self.injections) + 1, 0, None)
        fault = injection.fault
        injection.process = self._rng.randrange(self._num_processes) if fault.process is None else fault.process
        injection.attempt, self._requested = len(self.attempts), None
        start = self.attempts[-1].begin
        self._due_at = float("inf")
        if fault.step is not None:
            injection.moment = Moment("step", 0.0, fault.step)
        elif fault.phase is not None and fault.phase == "save" and fault.kind != "hang":
            injection.moment = Moment("save", 0.0, 1)
        elif fault.phase is not None:
            injection.moment = Moment("phase", 0.0, fault.from_step)
        elif fault.seconds is not None:
            self._due_at = max(self.attempts[0].begin + fault.seconds * self._turn, self._clock())
            return
        else:
            assert self._pace is not None
            faults_left = len(self._queue) + 1
            from_step = self._resumed_at if new_attempt else self._reached
            left = self._steps - from_step
            injection.moment = timing.draw(self._rng, self._pace, from_step, left, faults_left, self._idle)
            if injection.moment.at == "start" and not new_attempt:
                injection.moment = Moment("step", injection.moment.delay_s, from_step + 1)
        if injection.moment.at == "start":
            self._due_at = start + injection.moment.delay_s
        elif fault.kind not in INJECTED_BY_DRILL or injection.moment.at in ("save", "phase"):
            self._send_request(injection, children, injection.moment)

    def _send_request(self, injection: InjectionResult, children: Sequence[Child], moment: Moment) -> None:
        order = {"number": injection.number, "kind": injection.fault.kind, "seed": self._rng.randrange(1 << 30)}
        order |= {"at": moment.at, "moment": moment.number, "delay_s": moment.delay_s, "phase": injection.fault.phase}
        child = _current_children(children)[injection.process]
        number = next(number for number, candidate in enumerate(children) if candidate is child)
        self._requested = child, self._notes[number]
        self._notes[number].write(json.dumps(order).ljust(REQUEST_BYTES))

    def _was_replaced(self, children: Sequence[Child]) -> bool:
        return self._requested is not None and not any(child is self._requested[0] for child in children)

    def _inject_if_due(self, children: Sequence[Child], now: float) -> None:
        injection = self._pending
        if injection is None or injection.fired is not None:
            return
        at, by_drill = injection.moment, injection.fault.kind in INJECTED_BY_DRILL
        if by_drill and at is not None and at.at == "step" and self._reached >= at.number:
            self._due_at = now
        if now < self._due_at:
            return
        all_children, children = children, _current_children(children)
        child = children[injection.process]
        if child.exit is not None:
            return  # injected in the next attempt
        self._due_at = float("inf")
        if not by_drill and injection.fault.kind not in SIGNALS:
            return self._send_request(injection, all_children, Moment("now"))
        self._record(injection, self._clock(), (child.last_beat or {}).get("phase") or "start")
        if by_drill:
            return self._inject_here(injection, children)
        send(child.popen.pid, SIGNALS[injection.fault.kind])

    def _inject_here(self, injection: InjectionResult, children: Sequence[Child]) -> None:
        kind, child = injection.fault.kind, children[injection.process]
        if kind == "disk-full":
            _set_file_limit(children, DISK_FULL_BYTES)
        elif kind == "memory":
            _set_limit([child], resource.RLIMIT_AS, virtual_bytes(child.popen.pid))
        elif kind == "clock":
            injection.failed = self._clocks.set(injection.process, CLOCK_STEP_S)
        elif kind == "service":
            if self._service is None:
                injection.failed = "a job of one process has no coordination service"
            else:
                send(self._service, signal.SIGKILL)
        elif kind == "object-store":
            injection.failed = "there is no object store" if self._store is None else self._store.take_down()
        elif self._network is not None:
            injection.failed = self._network.inject(injection.fault.kind, injection.process)

    def _restore_outside(self) -> None:
        for each in (self._network, self._store):
            if each is not None:
                each.restore()

    def _record(self, injection: InjectionResult, when: float, phase: str, failed: str = "") -> None:
        for before in self._unrecovered():
            before.overtaken = True
        injection.fired, injection.phase, injection.failed, injection.reached = when, phase, failed, self._reached
        self.injections.append(injection)

    def _read_result(self, children: Sequence[Child]) -> None:
        """Reads whether a process has injected the pending fault, or has reached the moment of injection."""
        injection = self._pending
        if injection is None or injection.fired is not None or self._requested is None:
            return
        by_drill = injection.fault.kind in INJECTED_BY_DRILL
        if by_drill and any(child.exit is not None for child in children):
            return  # injected in the next attempt
        with suppress(ValueError):
            result = json.loads(self._requested[1].read()[RESULT_OFFSET:].rstrip(b" \0") or b"{}")
            if result.get("number") == injection.number:
                self._reached = max(self._reached, result["step"])
                self._record(injection, result["time"], result["phase"], result["failed"])
                if by_drill:
                    self._inject_here(injection, children)

    # ---- observing --------------------------------------------------------------------------------------------------

    def _note_end(self, children: Sequence[Child], now: float) -> None:
        """Records how the last fault of an attempt ended it. Steps that were passed before that are no recovery."""
        injections = [each for each in self.injections if each.attempt == len(self.attempts) and not each.overtaken]
        first = cause([child.exit for child in children if child.exit is not None])
        if first is None or not injections or injections[-1].in_process:
            return
        injection = injections[-1]
        injection.exit_code, injection.message = first.code, first.message or describe_status(first)
        injection.named, injection.recovered = first.blamed or (first.process,), None
        _detect_by_exit(injection, now, first.code, "the end of the attempt")

    def _unrecovered(self) -> list[InjectionResult]:
        """Returns the faults after which training has not yet passed the step that it had reached before."""
        return [injection for injection in self.injections if injection.recovered is None and not injection.overtaken]

    def _note_deaths(self, children: Sequence[Child], now: float) -> None:
        for child in children:
            if not child.is_removed or child.exit is None or any(child is other for other in self._noted_deaths):
                continue
            self._noted_deaths.append(child)
            for injection in self._unrecovered():
                injection.in_process = injection.in_process or injection.fault.kind in ENDS_ATTEMPT
                _detect_by_exit(injection, now, child.exit.code, f"the exit of process {child.process}")

    def _note_recovery(self, children: Sequence[Child], steps: Sequence[int], now: float) -> None:
        for injection in self._unrecovered():
            assert injection.fired is not None
            for child in children:
                if child.exit is not None and child.exit.code:  # exit code 0: finished
                    _detect_by_exit(injection, now, child.exit.code, f"the exit of process {child.process}")
            ends = injection.fault.kind in ENDS_ATTEMPT
            is_over = injection.detected is not None or (injection.fault.kind in TEMPORARY and now > injection.fired)
            passed = len(steps) == len(children) and min(steps) > injection.reached
            if is_over and passed and (not ends or injection.in_process or injection.attempt < len(self.attempts)):
                injection.recovered = now
        pending = self._pending
        if pending is None or pending.fired is None or (pending.fault.kind in ENDS_ATTEMPT and not pending.in_process):
            return
        if pending.fault.kind in TEMPORARY:
            done = now - pending.fired > TEMPORARY_FOR_S
        else:
            done = pending.detected is not None or bool(pending.failed)
        if done:
            if pending.fault.kind == "disk-full":
                _set_file_limit(children, None)
            if pending.fault.kind == "memory":
                _set_limit(children, resource.RLIMIT_AS, None)
            self._restore_outside()
            self._pending = None

    def _read_events(self) -> None:
        for when, event in self._events.new():
            name, step = event.get("event"), event.get("step")
            if name == "saved" and isinstance(step, int):
                self.committed.add(step)
                self.num_saves += 1
            if name == "rolled_back" and isinstance(step, int):
                self.committed = {saved for saved in self.committed if saved <= step}
            if name in ("restored", "started") and isinstance(step, int):
                self._resumed_at = step
                if (newest := max(self.committed, default=0)) > step:
                    self.lost_commits.append((newest, step))
            for injection in self._unrecovered():
                assert injection.fired is not None
                events = DETECTION_EVENTS.get(injection.fault.kind, ("fault",))
                if name in events and injection.detected is None and when >= injection.fired - 0.001:
                    injection.detected, injection.detected_by = when, f"the event '{name}'"
                if name in ("restored", "started", "rolled_back") and when >= injection.fired and isinstance(step, int):
                    injection.restored = step
                    injection.reached = max(injection.reached, int(event.get("from_step", 0)))

    def _close_notes(self) -> None:
        for note in self._notes:
            note.close()
        self._notes.clear()
        self._noted_deaths.clear()
        self._requested = None


def _detect_by_exit(injection: InjectionResult, now: float, code: int, how: str) -> None:
    """Records that the exit of a process with `code` has detected a fault, if that shows a fault of its kind."""
    codes = DETECTION_CODES.get(injection.fault.kind)
    if injection.detected is None and (codes is None or code in codes):
        injection.detected, injection.detected_by = now, how


def _current_children(children: Sequence[Child]) -> list[Child]:
    """Returns the current child of each process; replaced children and standbys are omitted."""
    last = {child.process: child for child in children if not child.is_standby and not child.is_removed}
    return [last[process] for process in sorted(last)]


def _in_order(faults: Sequence[Fault]) -> list[Fault]:
    """Returns faults with a step in ascending order, then faults with a time, then random ones."""
    return sorted(faults, key=lambda f: (f.step is None, f.step or 0, f.seconds is None, f.seconds or 0.0))


def _set_file_limit(children: Sequence[Child], num_bytes: int | None) -> None:
    """Limits the size of files that these processes write; None removes it. The error is EFBIG."""
    _set_limit(children, resource.RLIMIT_FSIZE, num_bytes)


def _set_limit(children: Sequence[Child], which: int, num_bytes: int | None) -> None:
    for child in children:
        with suppress(OSError):
            hard = resource.prlimit(child.popen.pid, which)[1]
            resource.prlimit(child.popen.pid, which, (hard if num_bytes is None else num_bytes, hard))
