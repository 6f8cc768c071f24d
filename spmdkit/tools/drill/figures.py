"""The figures of a drill, computed from its observations.

detection   from the fault until the launcher or the run detected it
recovery    from the fault until every process had begun a step that no process had begun before; excluding faults that
            were followed by another one before that
lost        steps that were begun and not restored, all of which are repeated
goodput     seconds from the first step to the end without faults / the same with faults; None if the run did not
            finish
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from spmdkit.tools.drill.timeline import BARS, Bars, InjectionResult, Start
from spmdkit.tools.drill.timing import Pace


def pace_of(attempts: Sequence[Start], steps: int, num_saves: int) -> Pace:
    """Returns the durations of an undisturbed run."""
    start_s, work_s = start_seconds(attempts), work_seconds(attempts)
    return Pace(start_s, work_s / steps, max(1, steps // max(1, num_saves)))


def start_seconds(attempts: Sequence[Start]) -> float:
    """Returns the seconds until the first step."""
    first = next((a for a in attempts if a.first_step is not None), attempts[0])
    return (first.first_step or first.end) - first.begin


def work_seconds(attempts: Sequence[Start]) -> float:
    """Returns the seconds from the first step to the end."""
    first = next((a.first_step for a in attempts if a.first_step is not None), attempts[0].end)
    return attempts[-1].end - first


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Returns median, 90th percentile, maximum and count; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    worst = {"p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], "max": ordered[-1]}
    return {name: round(x, 3) for name, x in {"median": statistics.median(ordered), **worst}.items()} | {
        "count": len(ordered)
    }


def injection_row(injection: InjectionResult, begin: float) -> dict[str, Any]:
    """Returns an injected fault as JSON values; times are seconds since the first start."""
    fired = injection.fired if injection.fired is not None else begin
    since: Callable[[float | None], float | None] = lambda when: None if when is None else round(when - fired, 3)
    return {
        "fault": str(injection.fault),
        "kind": injection.fault.kind,
        "process": injection.process,
        "attempt": injection.attempt,
        "at_s": round(fired - begin, 3),
        "step": injection.reached,
        "phase": injection.phase,
        "drawn_at": injection.moment.at if injection.moment is not None and injection.fault.step is None else None,
        "unfinished": injection.unfinished or None,
        "failed": injection.failed or None,
        "damaged": injection.damaged or None,
        "detection_s": since(injection.detected),
        "detected_by": injection.detected_by or None,
        "recovery_s": since(injection.recovered),
        "overtaken": injection.overtaken,
        "in_process": injection.in_process,
        "exit_code": injection.exit_code,
        "named": list(injection.named),
        "message": injection.message.partition("\n")[0] or None,
        "restored": injection.restored,
        "steps_lost": injection.lost,
    }


def summary(
    injections: Sequence[InjectionResult], attempts: Sequence[Start], clean: Sequence[Start], finished: bool = True
) -> dict[str, Any]:
    """Returns the figures over all faults; `finished`: the run with faults has trained all steps."""
    detection = [h.detected - h.fired for h in injections if h.detected is not None and h.fired is not None]
    recovery = [h.recovered - h.fired for h in injections if h.recovered is not None and h.fired is not None]
    lost = sum(h.lost or 0 for h in injections if not h.overtaken)
    disturbed, undisturbed = work_seconds(attempts), work_seconds(clean)
    return {
        "detection_s": spread(detection),
        "recovery_s": spread(recovery),
        "steps_lost": lost,
        "steps_repeated": lost,
        "goodput": round(min(1.0, undisturbed / disturbed), 4) if finished and disturbed > 0 else None,
        "work_s": round(disturbed, 3),
        "undisturbed_work_s": round(undisturbed, 3),
        "undisturbed_start_s": round(start_seconds(clean), 3),
    }


def shares(bars: Sequence[Bars]) -> dict[str, float]:
    """Returns kind of bar -> its share of the time of all processes."""
    seconds = {kind: sum(b.end - b.begin for process in bars for b in process.bars if b.kind == kind) for kind in BARS}
    total = sum(seconds.values()) or 1.0
    return {kind: round(s / total, 4) for kind, s in seconds.items() if s > 0}
