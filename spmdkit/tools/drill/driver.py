"""`Driver`: looks on from the launcher's loop, takes down what each process does, and lets faults come, one after the
other.

A fault at a step or a save is ordered ahead and done by the process itself (faults/injection/inject.py), exactly there;
one at a time is done from here. The next is ordered once the one before has ended its attempt, or was noticed. One that
does not come fails the drill: an injection that injects nothing proves nothing.

Where a job goes on without its dead (launch/membership.py), a process has several children one after the other in one
attempt; it is the last of them.
"""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from spmdkit.errors import ExitCode
from spmdkit.faults.injection.fault import ENDS, FROM_HERE, LASTS, OF_CHECKPOINTS, Fault
from spmdkit.faults.injection.protocol import FULL_BYTES, ORDER_BYTES, SAID_AT, SIGNALS, SLOW_FOR_S
from spmdkit.foundation.constants import DRILL_FILE
from spmdkit.foundation.run_status import step_of
from spmdkit.launch.process import send
from spmdkit.launch.supervisor import Child, Note
from spmdkit.tools.drill import corrupt, timing
from spmdkit.tools.drill.network import LAUNCHER, Network, host_address
from spmdkit.tools.drill.timeline import Bars, Events, InjectionResult, Start, bar_of
from spmdkit.tools.drill.timing import Moment, Pace

TELLS = (
    "straggler",
    "save_failed",
    "skipped",
    "nonfinite",
    "rolled_back",
    "replicas_differ",
    "preempted",
    "fault",
    "checkpoint_quarantined",
)
"""Events by which a run says that it has noticed something."""


class Driver:
    """A launcher's observer. `pace` and `steps` (of the run) are needed by random faults alone."""

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
    ):
        self._run_dir, self._num, self._pace, self._steps, self._clock = run_dir, num_processes, pace, steps, clock
        self._rng, self._network = random.Random(seed), network
        self._queue = [(fault, turn) for fault in _in_order(faults) for turn in range(1, fault.count + 1)]
        self.num_asked = len(self._queue)
        self.injections: list[InjectionResult] = []
        self.attempts: list[Start] = []
        self.bars = [Bars() for _ in range(num_processes)]
        self.asked: int | None = None
        self.committed: set[int] = set()  # steps whose save the run has reported, and that are not damaged
        self.num_saves = 0
        self.gone: list[tuple[int, int]] = []  # (a committed step, the older one from which the run went on)
        self._events = Events(run_dir)
        self._notes: list[Note] = []  # of the children of an attempt, in their order
        self._between = True  # attempts
        self._buried: list[Child] = []  # whose death was taken down, and the others went on
        self._armed: InjectionResult | None = None
        self._told: tuple[Child, Note] | None = None  # to whom the armed fault was ordered
        self._due = float("inf")
        self._turn = 0
        self._reached = self._idle = 0
        self._begun_at = 0  # the step from which the attempt goes on
        self._fresh = True

    # ---- the launcher's calls
    # ------------------------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[str, str]:
        """Returns where process 0 listens, and where the launcher and what it keeps do."""
        return ("127.0.0.1", "127.0.0.1") if self._network is None else (host_address(0), LAUNCHER)

    def host(self, process: int) -> AbstractContextManager[None]:
        """Returns within what a process is started."""
        return nullcontext() if self._network is None else self._network.host(process)

    def given(self, process: int) -> tuple[Mapping[str, str], Sequence[int]]:
        """Returns the variable of one process and the open file that it names."""
        if self._between:
            self._between, self._fresh = False, True
            self._close_notes()
            self.attempts.append(Start(self._clock(), newest_before=corrupt.newest(self._run_dir)))
        if process >= 0:  # and no standby
            self.bars[process].at("start", self._clock())
        note = Note()
        self._notes.append(note)
        return {DRILL_FILE: note.path}, [note.descriptor]

    def look(self, children: Sequence[Child]) -> None:
        """Takes down what is seen now, and does what is due."""
        now, attempt = self._clock(), self.attempts[-1]
        everybody, children = children, _living(children)
        if len(children) < self._num:
            return
        for child in children:
            said = child.said or {}
            kind = bar_of(said.get("phase"))
            if child.exit is not None:
                kind = "left" if child.exit.code in (0, ExitCode.PREEMPTED) else "dead"
            self.bars[child.process].at(kind, now)
        steps = [step_of(child.step.read()) for child in children]
        known = [step for step in steps if step is not None]
        self._take_events()
        if attempt.first_step is None and len(known) == len(children) and min(known) > self._begun_at:
            attempt.first_step = now
        if self._fresh:
            self._fresh = False
            self._arm(everybody, new_attempt=True)
        self._take_answer(children)
        if self._armed is not None and self._armed.fired is None and self._has_gone(children):
            self._arm(everybody, new_attempt=False)
        self._strike_if_due(everybody, now)
        self._reached = max([self._reached, *known])
        self._bury(everybody, now)
        self._follow(children, known, now)
        if self._armed is None:
            self._arm(everybody, new_attempt=False)

    def ended(self, children: Sequence[Child], asked: int | None) -> None:
        """Takes down the end of an attempt, and damages a checkpoint where that is ordered."""
        now, attempt = self._clock(), self.attempts[-1]
        self.asked, self._between = asked, True
        children = _living(children)
        self._take_events()
        self._take_answer(children)
        attempt.end = now
        if self._network is not None:
            self._network.heal()
        died = [child.process for child in children if child.exit is None or child.exit.code]
        for injection in self._open():
            if injection.detected is None and died:
                injection.detected, injection.detected_by = now, "the end of all"
        for injection in self.injections:
            if injection.attempt == len(self.attempts) and injection.fault.kind in ENDS and not _is_over(injection):
                injection.reached, injection.unfinished = self._reached, corrupt.unfinished(self._run_dir)
        newest = corrupt.newest(self._run_dir)
        self._idle = 0 if newest > attempt.newest_before else self._idle + 1
        done = self._armed
        if done is not None and done.fired is not None:
            if done.fault.kind in OF_CHECKPOINTS:
                done.damaged = corrupt.damage(self._run_dir, done.fault.kind, self._rng)
                self.committed.discard(newest)
                done.failed = done.failed or (
                    "" if done.damaged else "there was no checkpoint yet that could be damaged"
                )
            self._armed = None
        for child in children:
            self.bars[child.process].at("restart", now)
        self._begun_at = newest

    def close(self) -> None:
        """Ends the bars; nothing is looked at any more."""
        self._close_notes()
        for bars in self.bars:
            if bars.bars and bars.bars[-1].kind == "restart":
                bars.bars.pop()

    # ---- ordering ------------------------------------------------------------------------------------------------------

    def _arm(self, children: Sequence[Child], new_attempt: bool) -> None:
        """Orders the next fault; one that did not come in the attempt before is ordered again."""
        injection = self._armed
        if injection is None:
            if not self._queue:
                return
            fault, self._turn = self._queue[0]
            if fault.step is None and fault.seconds is None and not new_attempt and self._reached >= self._steps:
                return
            self._queue.pop(0)
            injection = self._armed = InjectionResult(fault, len(self.injections) + 1, 0, None)
        fault = injection.fault
        injection.process = self._rng.randrange(self._num) if fault.process is None else fault.process
        injection.attempt, self._told = len(self.attempts), None
        begun = self.attempts[-1].begin
        self._due = float("inf")
        if fault.step is not None:
            injection.moment = Moment("step", 0.0, fault.step)
        elif fault.seconds is not None:
            self._due = max(self.attempts[0].begin + fault.seconds * self._turn, self._clock())
            return
        else:
            assert self._pace is not None
            faults_left = len(self._queue) + 1
            from_step = self._begun_at if new_attempt else self._reached
            left = self._steps - from_step
            injection.moment = timing.draw(self._rng, self._pace, from_step, left, faults_left, self._idle)
            if injection.moment.at == "start" and not new_attempt:
                injection.moment = Moment("step", injection.moment.delay_s, from_step + 1)
        if injection.moment.at == "start":
            self._due = begun + injection.moment.delay_s
        elif fault.kind not in FROM_HERE or injection.moment.at == "save":
            self._order(injection, children, injection.moment.at, injection.moment.number, injection.moment.delay_s)

    def _order(
        self, injection: InjectionResult, children: Sequence[Child], at: str, moment: int = 0, delay_s: float = 0.0
    ) -> None:
        order = {
            "number": injection.number,
            "kind": injection.fault.kind,
            "at": at,
            "moment": moment,
            "delay_s": delay_s,
        }
        order["seed"] = self._rng.randrange(1 << 30)
        child = _living(children)[injection.process]
        number = next(number for number, each in enumerate(children) if each is child)
        self._told = child, self._notes[number]
        self._notes[number].write(json.dumps(order).ljust(ORDER_BYTES))

    def _has_gone(self, children: Sequence[Child]) -> bool:
        """Returns whether another child is the process by now that the armed fault was ordered to."""
        return self._told is not None and not any(child is self._told[0] for child in children)

    def _strike_if_due(self, children: Sequence[Child], now: float) -> None:
        """Does from here what comes at a time."""
        injection = self._armed
        if injection is None or injection.fired is not None:
            return
        at = injection.moment
        if injection.fault.kind in FROM_HERE and at is not None and at.at == "step" and self._reached >= at.number:
            self._due = now
        if now < self._due:
            return
        everybody, children = children, _living(children)
        child = children[injection.process]
        if child.exit is not None:
            return  # in the next attempt
        self._due = float("inf")
        if injection.fault.kind in FROM_HERE:
            self._fired(injection, self._clock(), (child.said or {}).get("phase") or "start")
            return self._from_here(injection, children)
        if injection.fault.kind not in SIGNALS:
            return self._order(injection, everybody, "now")
        self._fired(injection, self._clock(), (child.said or {}).get("phase") or "start")
        send(child.popen.pid, SIGNALS[injection.fault.kind])

    def _from_here(self, injection: InjectionResult, children: Sequence[Child]) -> None:
        if injection.fault.kind == "disk-full":
            _room(children, FULL_BYTES)
        elif self._network is not None:
            injection.failed = self._network.inject(injection.fault.kind, injection.process)

    def _fired(self, injection: InjectionResult, when: float, phase: str, failed: str = "") -> None:
        for before in self._open():
            before.overtaken = True
        injection.fired, injection.phase, injection.failed, injection.reached = when, phase, failed, self._reached
        self.injections.append(injection)

    def _take_answer(self, children: Sequence[Child]) -> None:
        """Takes note of what a process says that it has done to itself, or that the moment has come to do."""
        injection = self._armed
        if injection is None or injection.fired is not None or self._told is None:
            return
        from_here = injection.fault.kind in FROM_HERE
        if from_here and any(child.exit is not None for child in children):
            return  # in the next attempt
        with suppress(ValueError):
            said = json.loads(self._told[1].read()[SAID_AT:].rstrip(b" \0") or b"{}")
            if said.get("number") == injection.number:
                self._reached = max(self._reached, said["step"])
                self._fired(injection, said["time"], said["phase"], said["failed"])
                if from_here:
                    self._from_here(injection, children)

    # ---- what follows --------------------------------------------------------------------------------------------------

    def _open(self) -> list[InjectionResult]:
        """Returns the faults after which training is not yet beyond where it had been."""
        return [injection for injection in self.injections if injection.recovered is None and not injection.overtaken]

    def _bury(self, children: Sequence[Child], now: float) -> None:
        """Takes note of the deaths without which the others go on."""
        for child in children:
            if not child.mourned or child.exit is None or any(child is other for other in self._buried):
                continue
            self._buried.append(child)
            for injection in self._open():
                injection.in_process = injection.in_process or injection.fault.kind in ENDS
                if injection.detected is None:
                    injection.detected, injection.detected_by = now, f"the exit of process {child.process}"

    def _follow(self, children: Sequence[Child], steps: Sequence[int], now: float) -> None:
        """Takes note of what is noticed and of what goes on again; an order that is done with makes room for the
        next."""
        for injection in self._open():
            assert injection.fired is not None
            dead = [c.process for c in children if c.exit is not None and c.exit.code]  # with 0 it is done
            if injection.detected is None and dead:
                injection.detected, injection.detected_by = now, f"the exit of process {dead[0]}"
            ends = injection.fault.kind in ENDS
            is_over = injection.detected is not None or (injection.fault.kind in LASTS and now > injection.fired)
            if (
                is_over
                and len(steps) == len(children)
                and min(steps) > injection.reached
                and (not ends or injection.in_process or injection.attempt < len(self.attempts))
            ):
                injection.recovered = now
        armed = self._armed
        if armed is None or armed.fired is None or (armed.fault.kind in ENDS and not armed.in_process):
            return
        if armed.fault.kind in LASTS:
            done = now - armed.fired > SLOW_FOR_S
        else:
            done = armed.detected is not None or bool(armed.failed)
        if done:
            if armed.fault.kind == "disk-full":
                _room(children, None)
            if self._network is not None:
                self._network.heal()
            self._armed = None

    def _take_events(self) -> None:
        for when, event in self._events.new():
            name, step = event.get("event"), event.get("step")
            if name == "saved" and isinstance(step, int):
                self.committed.add(step)
                self.num_saves += 1
            if name == "rolled_back" and isinstance(step, int):
                self.committed = {saved for saved in self.committed if saved <= step}
            if name in ("restored", "started") and isinstance(step, int):
                self._begun_at = step
                if (newest := max(self.committed, default=0)) > step:
                    self.gone.append((newest, step))
            for injection in self._open():
                assert injection.fired is not None
                if (
                    name in TELLS
                    and injection.detected is None
                    and when >= injection.fired - 0.001
                    and name != "checkpoint_quarantined"
                ):
                    injection.detected, injection.detected_by = when, f"the event '{name}'"
                if name in ("restored", "started", "rolled_back") and when >= injection.fired and isinstance(step, int):
                    injection.restored = step
                    injection.reached = max(injection.reached, int(event.get("from_step", 0)))

    def _close_notes(self) -> None:
        for note in self._notes:
            note.close()
        self._notes.clear()
        self._buried.clear()
        self._told = None


def _living(children: Sequence[Child]) -> list[Child]:
    """Returns the child that is each process now; neither who is dead and replaced, nor standbys."""
    last = {child.process: child for child in children if not child.in_waiting and not child.mourned}
    return [last[process] for process in sorted(last)]


def _is_over(injection: InjectionResult) -> bool:
    """Returns whether a fault was survived in the same start, whose end says nothing of it."""
    return injection.in_process and (injection.recovered is not None or injection.overtaken)


def _in_order(faults: Sequence[Fault]) -> list[Fault]:
    """Returns those with a step first, from the first step to the last, then those with a time, then random ones."""
    return sorted(faults, key=lambda f: (f.step is None, f.step or 0, f.seconds is None, f.seconds or 0.0))


def _room(children: Sequence[Child], num_bytes: int | None) -> None:
    """Lets no file of these processes grow beyond so many bytes; None: as before. Linux; the error is EFBIG, which is
    told as a disk that is full is."""
    for child in children:
        with suppress(OSError):
            hard = resource.prlimit(child.popen.pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(child.popen.pid, resource.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))
