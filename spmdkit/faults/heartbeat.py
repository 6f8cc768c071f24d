"""What one process concludes from the heartbeats of all: lost processes, hangs, stragglers. Pure.

A beat is a line that each process writes every second. Times in it are of its own clock without pauses, so that no
clock is compared with another.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from spmdkit.foundation.phase import EVALUATION, READING, WAITING
from spmdkit.foundation.timeouts import FIRST_BATCH_TIMEOUT_S, MIN_STEP_TIMEOUT_S, STRAGGLER_WINDOW_S

STEP = "step"
OWN_SHARE = 0.25
"""A straggler spends this much more of the wall time in its own phase than the median of the others does."""
BEFORE_TRAINING = ("begin", "import", "compile", "restore", "init", "end")

DOES = {
    "begin": "starting",
    "import": "importing the task and building its program",
    "compile": "compiling",
    "restore": "restoring",
    "init": "making the state",
    "data": "reading data",
    STEP: "in the step",
    "evaluation": "evaluating",
    "save": "saving",
    "printing": "printing",
    "end": "ending",
}


@dataclass(frozen=True)
class Beat:
    """The heartbeat of a process."""

    phase: str
    detail: str
    step: int
    for_s: float  # seconds in the phase, without pauses
    limit_s: float | None  # how many it may be there; None: as long as others let it wait
    spent: Mapping[str, float] = field(default_factory=dict)  # phase -> seconds so far

    @property
    def works(self) -> bool:
        """Whether it does not wait for others."""
        return self.phase not in (STEP, WAITING)

    @property
    def overdue(self) -> bool:
        return self.limit_s is not None and self.for_s > self.limit_s

    @property
    def does(self) -> str:
        """`reading data`, `waiting for others at 'committed'`."""
        if self.phase == WAITING:
            return f"waiting for others at '{self.detail}'"
        return DOES.get(self.phase, f"in the {self.phase}") + (f" ({self.detail})" if self.detail else "")


def to_text(beat: Beat) -> str:
    return json.dumps(asdict(beat))


def from_text(text: str) -> Beat:
    return Beat(**json.loads(text))


@dataclass(frozen=True)
class Limits:
    """How many seconds a phase may take; see `Watchdog` in config/sections.py."""

    step_timeout_s: float | None
    import_timeout_s: float
    compile_timeout_s: float
    restore_timeout_s: float
    save_timeout_s: float
    evaluation_timeout_s: float

    def of(self, phase: str, step_s: float | None) -> float | None:
        """Returns the limit of a phase, where a step takes `step_s`; None before that is known. Steps in flight are
        waited for together: 16 of them, and room."""
        if phase in ("data", STEP):
            if self.step_timeout_s is not None:
                return self.step_timeout_s
            if step_s is None:
                return FIRST_BATCH_TIMEOUT_S if phase == "data" else self.compile_timeout_s
            return max(MIN_STEP_TIMEOUT_S, STEPS * step_s)
        limit: float | None = None if phase == WAITING else getattr(self, LIMIT_OF.get(phase, "evaluation_timeout_s"))
        return limit


STEPS = 40
LIMIT_OF = {
    "begin": "import_timeout_s",
    "import": "import_timeout_s",
    "compile": "compile_timeout_s",
    "init": "compile_timeout_s",
    "restore": "restore_timeout_s",
    "save": "save_timeout_s",
    "end": "save_timeout_s",
    "data": "step_timeout_s",
    STEP: "step_timeout_s",
}
"""Phase -> its key in the section `watchdog`; what is not here is a hook's, or the evaluation."""


def culprits(beats: Mapping[int, Beat], quiet: Iterable[int] = ()) -> tuple[int, ...]:
    """Returns the processes that hold up the job, none while it may still go on.

    A process that works on its own for longer than it may holds up the others; in an evaluation that is the one that
    reads. In the step all wait for all: there the job hangs when all are overdue, and blamed are those without a
    heartbeat, then those that are behind.
    """
    reads = {p for p, b in beats.items() if b.phase == EVALUATION and b.detail == READING}
    over = [
        p
        for p, b in beats.items()
        if b.works and b.overdue and not (reads and b.phase == EVALUATION and p not in reads)
    ]
    if over:
        return tuple(sorted(over))
    in_step = {p: b for p, b in beats.items() if b.phase == STEP}
    if not in_step or any(b.works for b in beats.values()) or not all(b.overdue for b in in_step.values()):
        return ()
    if suspects := sorted(set(quiet) & set(beats)):
        return tuple(suspects)
    least = min(b.step for b in in_step.values())
    return tuple(sorted(p for p, b in in_step.items() if b.step == least))


def silent(now: float, seen: Mapping[int, float], others: Iterable[int], limit_s: float) -> list[int]:
    """Returns the processes without a new beat for `limit_s`, or without any in twice that time; `seen`: when each beat
    was new."""
    never = [p for p in others if p not in seen and now > 2 * limit_s]
    return sorted(never + [p for p, when in seen.items() if now - when > limit_s])


def stand(beats: Mapping[int, Beat], blamed: Iterable[int]) -> str:
    """Returns who stands where: `p3 has been reading data for 41 s at step 812; p0, p1, p2 wait in the step`."""
    blamed = list(blamed)
    parts = []
    for does in dict.fromkeys((beats[p].does, beats[p].step) for p in blamed if p in beats):
        those = [p for p in blamed if p in beats and (beats[p].does, beats[p].step) == does]
        have = "has" if len(those) == 1 else "have"
        longest = max(beats[p].for_s for p in those)
        parts.append(f"{_names(those)} {have} been {does[0]} for {longest:.0f} s at step {does[1]}")
    others = {p: b for p, b in beats.items() if p not in blamed}
    for waits in dict.fromkeys(_waits(b) for b in others.values()):
        those = [p for p, b in others.items() if _waits(b) == waits]
        parts.append(f"{_names(those)} {waits[len(those) > 1]}")
    return "; ".join(parts)


def _waits(beat: Beat) -> tuple[str, str]:
    if beat.phase == STEP:
        return "waits in the step", "wait in the step"
    if beat.phase == WAITING:
        return f"waits at '{beat.detail}'", f"wait at '{beat.detail}'"
    return f"is {beat.does}", f"are {beat.does}"


def _names(processes: Iterable[int]) -> str:
    return ", ".join(f"p{p}" for p in sorted(processes))


def hang_report(verdict: Mapping[str, Any], beats: Mapping[int, Beat], newest: str) -> str:
    """Returns the message with which the watchdog ends a job: what was seen, the rule, what to do."""
    blamed = verdict["processes"]
    who = " and ".join(f"process {p}" for p in blamed)
    last = beats.get(blamed[0])
    if verdict["why"] == "left":
        left = "is gone" if verdict["exit"] is None else f"has left with exit code {verdict['exit']}"
        return (
            f"{who} {left}: {verdict['message']}\nNo step is possible without it, so this process ends too; the "
            "cause is in that one's own output."
        )
    seen = "" if last is None else f"was last seen {last.does} at step {last.step}."
    if verdict["why"] == "unreachable":
        return (
            "the coordination service has not responded for longer than watchdog.heartbeat_timeout_s: the machine that "
            "holds it (process 0's, or that of the launcher) is gone, or the network to it. "
            f"{f'Process 0 {seen}' if seen else ''} No step is possible without it. {newest} See to it, and start all "
            "processes again.".replace("  ", " ")
        )
    if verdict["why"] == "silent":
        one = len(blamed) == 1
        hint = f"It {seen}" if one and seen else "" if one else "Check the network between the machines first."
        return (
            f"{who} {'is' if one else 'are'} silent: no sign of life for longer than watchdog.heartbeat_timeout_s. "
            f"{hint} A silent process is stopped, its machine is gone or cut off, or its interpreter is held, and no "
            f"step is possible without it. {newest} See to it, and start all processes again.".replace("  ", " ")
        )
    key = LIMIT_OF.get(last.phase, "evaluation_timeout_s") if last else "step_timeout_s"
    limit = last.limit_s if last else None
    most = "" if limit is None else f" It may take {limit:.0f} s (watchdog.{key})."
    return (
        f"no progress: {stand(beats, blamed)}.{most} {newest} Look at the stacks, and start the same command again; "
        f"raise watchdog.{key} where that was no hang.".replace("  ", " ")
    )


@dataclass(frozen=True)
class Straggler:
    """A process that the others wait for: `phase` takes `share` of its time, and `usual` of theirs."""

    process: int
    phase: str
    share: float
    usual: float


def straggler(
    before: Mapping[int, Mapping[str, float]], after: Mapping[int, Mapping[str, float]], wall_s: float
) -> Straggler | None:
    """Returns the process that held up the others in the last `wall_s` seconds, None where all are equally slow."""
    worst: Straggler | None = None
    both = sorted(set(before) & set(after))
    for phase in {phase for p in both for phase in after[p]} - {STEP, WAITING, *BEFORE_TRAINING}:
        share = {p: (after[p].get(phase, 0.0) - before[p].get(phase, 0.0)) / wall_s for p in both}
        for p in both if len(both) > 1 else ():
            usual = statistics.median(share[q] for q in both if q != p)
            if share[p] - usual > max(OWN_SHARE, 0.0 if worst is None else worst.share - worst.usual):
                worst = Straggler(p, phase, min(share[p], 1.0), usual)
    return worst


def straggler_text(found: Straggler) -> str:
    does = DOES.get(found.phase, f"the {found.phase}")
    return (
        f"process {found.process} holds up the others: {does} takes {found.share:.0%} of its time, and "
        f"{found.usual:.0%} of theirs. Steps are as slow as the slowest process."
    )


class Stragglers:
    """Looks at windows of time, and names a process that held up the others in two of them in turn."""

    def __init__(self, window_s: float = STRAGGLER_WINDOW_S):
        self._window_s = window_s
        self._begun: tuple[float, Mapping[int, Mapping[str, float]]] | None = None
        self._suspect: tuple[int, str] | None = None

    def look(self, now: float, spent: Mapping[int, Mapping[str, float]]) -> list[str]:
        """Returns the lines to log at `now`; `spent`: seconds of each process in each phase so far."""
        if self._begun is None:
            self._begun = now, spent
        if now - self._begun[0] < self._window_s:
            return []
        found = straggler(self._begun[1], spent, now - self._begun[0])
        again = found is not None and (found.process, found.phase) == self._suspect
        self._suspect = None if found is None or again else (found.process, found.phase)  # logged again after two more
        self._begun = now, spent
        return [straggler_text(found)] if found is not None and again else []
