"""Conclusions of one process from the heartbeats of all: lost processes, hangs, stragglers. Pure.

A heartbeat is a line that each process writes every second. Its times are durations by the process's clock, which
excludes pauses, so clocks of different processes are never compared.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from spmdkit.foundation.phase import EVALUATION, READING, WAITING
from spmdkit.foundation.timeouts import (
    FIRST_BATCH_TIMEOUT_S,
    HEARTBEAT_INTERVAL_S,
    MIN_STEP_TIMEOUT_S,
    STRAGGLER_WINDOW_S,
)

STEP = "step"
SERVICE_LOST = (
    "the coordination service has ended (its process was killed, or its machine is lost), so this process ends too: "
    "start the same command again to resume from the newest checkpoint."
)
OWN_SHARE = 0.25
"""A straggler's share of the wall time in a phase exceeds the median of the other processes by more than this."""
BEFORE_TRAINING = ("begin", "import", "compile", "restore", "init", "end")

ACTIVITIES = {
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
    phase_s: float  # seconds in the phase, without pauses
    limit_s: float | None  # limit of `phase_s`; None: no limit while it waits for others
    spent: Mapping[str, float] = field(default_factory=dict)  # phase -> seconds so far
    hook: str = ""  # the user-defined hook, with the line, in which it is
    hooks_passed: int = 0
    callback: str = ""  # the line of user code in which a callback of the step is
    passed_s: float = 0.0  # seconds since `hooks_passed` changed
    requested: str = ""  # the action that `hook` requested of all processes, until they perform it
    in_jax: bool = False  # in the step or an evaluation for a second: the training thread waits in jax, for devices
    unanswered: bool = False  # likewise: a peer acknowledges nothing on one of its connections

    @property
    def works(self) -> bool:
        """Whether it is not waiting for other processes."""
        return self.phase not in (STEP, WAITING)

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is in an evaluation, and not in jax, for a second."""
        return self.phase == EVALUATION and not self.in_jax and self.phase_s > HEARTBEAT_INTERVAL_S

    @property
    def overdue(self) -> bool:
        return self.limit_s is not None and self.phase_s > self.limit_s

    @property
    def does(self) -> str:
        """The phase for a message: `reading data`, `waiting for others at 'committed'`."""
        if self.callback:
            return f"in a callback of the step{self.callback}"
        if self.phase == WAITING:
            return f"waiting for others at '{self.detail}'"
        return ACTIVITIES.get(self.phase, f"in the {self.phase}") + (f" ({self.detail})" if self.detail else "")


def to_text(beat: Beat) -> str:
    return json.dumps(asdict(beat))


def from_text(text: str) -> Beat:
    return Beat(**json.loads(text))


@dataclass(frozen=True)
class Limits:
    """Time limits of the phases in seconds; see `Watchdog` in config/sections.py."""

    step_timeout_s: float | None
    import_timeout_s: float
    compile_timeout_s: float
    restore_timeout_s: float
    save_timeout_s: float
    evaluation_timeout_s: float

    def of(self, phase: str, step_s: float | None) -> float | None:
        """Returns the limit of a phase. `step_s`: duration of a step, None before it is known. Steps in flight complete
        together: the limit covers 16 of them with a margin."""
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
"""Phase -> its key in the section `watchdog`; every other phase is a hook's or the evaluation."""


def blocking_processes(beats: Mapping[int, Beat], quiet: Iterable[int] = ()) -> tuple[int, ...]:
    """Returns the processes that block the job, none while the job may still continue.

    A process that works and exceeds its limit blocks the others; in an evaluation only the reading process does, or the
    one that is not in jax. In the step all processes wait for each other. There the job hangs when all of them exceed
    the limit, or the last one if it is not in jax. The processes at fault are those without a heartbeat, otherwise
    those in a callback, otherwise those with a broken connection, otherwise those at the lowest step, in it or waiting
    before it; if some of them are in jax, the others.
    """
    reads = {p for p, b in beats.items() if b.phase == EVALUATION and b.detail == READING}
    over = [
        p
        for p, b in beats.items()
        if b.works and b.overdue and not (reads and b.phase == EVALUATION and p not in reads)
    ]
    if any(beats[p].phase == EVALUATION and beats[p].in_jax for p in over):  # these wait for one that is elsewhere
        elsewhere = [p for p, b in beats.items() if b.is_elsewhere]
        over = list(set(quiet) & set(beats)) or [p for p, b in beats.items() if b.unanswered] or elsewhere or over
    if over:
        return tuple(sorted(over))
    in_step = {p: b for p, b in beats.items() if b.phase == STEP}
    if not in_step or any(b.works for b in beats.values()):
        return ()
    in_callback = sorted(p for p, b in beats.items() if b.callback)
    unanswered = sorted(p for p, b in beats.items() if b.unanswered)
    suspects = sorted(set(quiet) & set(beats)) or in_callback or unanswered
    least = min(b.step for b in beats.values())
    last = sorted(p for p, b in beats.items() if b.step == least)
    idle = [p for p in last if not beats[p].in_jax]
    others_wait = all(b.in_jax or b.phase == WAITING for p, b in beats.items() if p not in idle)
    one_hangs = bool(idle) and others_wait and all(beats[p].overdue for p in idle)
    return tuple(suspects or idle or last) if one_hangs or all(b.overdue for b in in_step.values()) else ()


class OneSidedHooks:
    """Finds processes that are inside a hook for longer than `limit_s` after another process has left it."""

    def __init__(self, limit_s: float):
        self._limit_s, self._since = limit_s, dict[int, tuple[int, float]]()

    def update(self, now: float, beats: Mapping[int, Beat]) -> tuple[int, ...]:
        """Returns the processes to blame at `now`, none while all processes are in the same hook."""
        ahead = max(beat.hooks_passed for beat in beats.values())
        left = now - max(beat.passed_s for beat in beats.values() if beat.hooks_passed == ahead)
        behind = {p: b.hooks_passed for p, b in beats.items() if b.hook and b.hooks_passed < ahead}
        since = self._since
        begun = {p: (n, max(left, now - beats[p].phase_s)) for p, n in behind.items()}
        self._since = {p: since[p] if p in since and since[p][0] == each[0] else each for p, each in begun.items()}
        return tuple(sorted(p for p, (_, begun) in self._since.items() if now - begun > self._limit_s))


def find_silent(now: float, seen: Mapping[int, float], others: Iterable[int], limit_s: float) -> list[int]:
    """Returns the processes without a new heartbeat for `limit_s`; `seen`: the time of each process's last new
    heartbeat. All processes have joined when the clock starts."""
    never = [p for p in others if p not in seen and now > limit_s]
    return sorted(never + [p for p, when in seen.items() if now - when > limit_s])


def describe_phases(beats: Mapping[int, Beat], blamed: Iterable[int]) -> str:
    """Returns the state of all: `p3 has been reading data for 41 s at step 812; p0, p1, p2 wait in the step`."""
    blamed = list(blamed)
    parts = []
    for does in dict.fromkeys((beats[p].does, beats[p].step) for p in blamed if p in beats):
        processes = [p for p in blamed if p in beats and (beats[p].does, beats[p].step) == does]
        have = "has" if len(processes) == 1 else "have"
        longest = max(beats[p].phase_s for p in processes)
        parts.append(f"{_names(processes)} {have} been {does[0]} for {longest:.0f} s at step {does[1]}")
    others = {p: b for p, b in beats.items() if p not in blamed}
    for waits in dict.fromkeys(_waits(b) for b in others.values()):
        processes = [p for p, b in others.items() if _waits(b) == waits]
        parts.append(f"{_names(processes)} {waits[len(processes) > 1]}")
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
    """Returns the message with which the watchdog ends a job: the observation, the rule, the repair."""
    blamed = verdict["processes"]
    if verdict["why"] == "service":
        return f"{SERVICE_LOST} {newest}".rstrip()
    who = " and ".join(f"process {p}" for p in blamed)
    last = beats.get(blamed[0])
    if verdict["why"] == "exited":
        exited = "is gone" if verdict["exit"] is None else f"ended with exit code {verdict['exit']}"
        return (
            f"{who} {exited}: {verdict['message']}\nNo step is possible without it, so this process ends too; the "
            "cause is in its output."
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
        single = len(blamed) == 1
        hint = f"It {seen}" if single and seen else "" if single else "Check the network between the machines first."
        return (
            f"{who} {'is' if single else 'are'} silent: no sign of life for longer than watchdog.heartbeat_timeout_s. "
            f"{hint} A silent process is stopped, its machine is lost or unreachable, or its interpreter is blocked. "
            f"No step is possible without it. {newest} See to it, and start all processes again.".replace("  ", " ")
        )
    if (hook := verdict.get("hook")) and (action := verdict.get("requested")):
        return (
            f"no progress: hook {hook} returned {action} on {who}, and another process left it without that for longer "
            "than watchdog.hook_timeout_s. All processes perform an action at the same step. Return it on every "
            f"process at the same step, without `known=True` if it has that. {newest}"
        ).rstrip()
    if hook:
        return (
            f"no progress: {who} {'is' if len(blamed) == 1 else 'are'} in hook {hook} for longer than "
            "watchdog.hook_timeout_s after another process left it. A computation on a sharded state needs all "
            'processes. Call run.gather(tree) on all processes (on="all", outside of `if run.cluster.is_main:`) and '
            f"use its arrays on one. {newest} Raise watchdog.hook_timeout_s for a hook that is slow on one process."
        ).replace("  ", " ")
    key = LIMIT_OF.get(last.phase, "evaluation_timeout_s") if last else "step_timeout_s"
    limit = last.limit_s if last else None
    allowed = "" if limit is None else f" It may take {limit:.0f} s (watchdog.{key})."
    return (
        f"no progress: {describe_phases(beats, blamed)}.{allowed} {newest} Look at the stacks, and start the same "
        f"command again; raise watchdog.{key} where that was no hang.".replace("  ", " ")
    )


@dataclass(frozen=True)
class Straggler:
    """A process that the others wait for: it spends `share` of its time in `phase`, the others `usual`."""

    process: int
    phase: str
    share: float
    usual: float


def straggler(
    before: Mapping[int, Mapping[str, float]], after: Mapping[int, Mapping[str, float]], wall_s: float
) -> Straggler | None:
    """Returns the process that delayed the others in the last `wall_s` seconds, None if all are equally slow."""
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
    does = ACTIVITIES.get(found.phase, f"the {found.phase}")
    return (
        f"process {found.process} holds up the others: {does} takes {found.share:.0%} of its time, and "
        f"{found.usual:.0%} of theirs. Steps are as slow as the slowest process."
    )


class Stragglers:
    """Compares windows of time, and reports a process that delayed the others in two consecutive windows."""

    def __init__(self, window_s: float = STRAGGLER_WINDOW_S):
        self._window_s = window_s
        self._begun: tuple[float, Mapping[int, Mapping[str, float]]] | None = None
        self._suspect: tuple[int, str] | None = None

    def update(self, now: float, spent: Mapping[int, Mapping[str, float]]) -> list[str]:
        """Returns the lines to log at `now`; `spent`: seconds that each process has spent in each phase."""
        if self._begun is None:
            self._begun = now, spent
        if now - self._begun[0] < self._window_s:
            return []
        worst = straggler(self._begun[1], spent, now - self._begun[0])
        again = worst is not None and (worst.process, worst.phase) == self._suspect
        self._suspect = None if worst is None or again else (worst.process, worst.phase)  # repeats in two more windows
        self._begun = now, spent
        return [straggler_text(worst)] if worst is not None and again else []
