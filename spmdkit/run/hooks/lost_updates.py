"""Warns once in a run of bfloat16 parameters that their updates do not change, since the sum is rounded to them.

The step measures the updates of each leaf and the part that is lost (spmdkit/step/lost_updates.py). The hook reads both
at log steps and adds them over the last half of the run or more, and at least `MIN_STEPS`. A leaf is reported if it
loses `MIN_SHARE` of them. Updates of size zero are no evidence. A decay of the learning rate to zero is not reported:
its last updates, which are lost, are a small part of the sum. While updates grow, as in a warm-up, nothing is reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spmdkit.run.hooks.base import Hook, RunView

MIN_STEPS, MAX_NAMES = 1000, 4
MIN_SHARE = 0.9
"""Adam, a transformer with 67,000 parameters, 2500 steps: where most leaves lost 90 to 95 % (learning rate 1e-4), the
loss was 3.43, with float32 parameters 2.62, rounded stochastically 2.68 (2026-11-26)."""
GROWING = 1.25
"""An update larger than the mean of the previous interval by this factor is part of a warm-up. The least factor in a
linear warm-up is 4/3."""

Sums = list[list[float]]
"""[steps, size of the updates, lost size] of each leaf."""


@dataclass
class Intervals:
    """The measured updates of the current interval and of the one before. An interval ends when it is as long as
    everything before it, so that the two cover the last half of the run or more.

    Attributes:
        start: step before the current interval.
        last: the last measured step.
        is_reported: whether the run has warned.
    """

    start: int = 0
    last: int = 0
    before: Sums = field(default_factory=list)
    current: Sums = field(default_factory=list)
    is_reported: bool = False

    def add(self, step: int, sizes: np.ndarray[Any, Any]) -> list[tuple[int, float]]:
        """Adds (size, lost) of each leaf at a step; returns (number, lost share) of the leaves to report."""
        if len(self.current) != len(sizes):
            self.before, self.current = ([[0.0] * 3 for _ in sizes] for _ in range(2))
        steps, self.last, found = step - self.last, step, []
        for number, (size, lost) in enumerate(sizes.tolist()):
            if not 0 < size < np.inf:
                continue
            for i, x in enumerate((1, size, lost)):
                self.current[number][i] += steps * x
            before = self.before[number]
            num, total, total_lost = (a + b for a, b in zip(before, self.current[number], strict=True))
            is_growing = not before[0] or size > GROWING * before[1] / before[0]
            if num >= MIN_STEPS and total_lost >= MIN_SHARE * total and not is_growing:
                found.append((number, total_lost / total))
        if step - self.start >= max(self.start, MIN_STEPS // 2):
            self.before, self.current, self.start = self.current, [[0.0] * 3 for _ in sizes], step
        return found


def make(config: Any) -> Hook | None:
    """Returns the hook that warns; None if the parameters have 32 bits or are rounded stochastically."""
    if config.precision.params != "bfloat16" or config.precision.rounding == "stochastic":
        return None
    measured = [Intervals()]

    def begin(run: RunView, step: int, state: Any) -> None:
        if not measured[0].current:
            measured[0].last = step

    def after_step(run: RunView, step: int, state: Any, metrics: Any) -> None:
        intervals, sizes = measured[0], run.program.checks.sizes
        if sizes is None or intervals.is_reported or not run.is_log_step(step):
            return
        run.numbers(step, metrics)  # waits for the step
        if found := intervals.add(step, _of_this_process(sizes)):
            intervals.is_reported = True
            names = run.program.narrow_leaves
            run.message(_warning(step, [(names[number], share) for number, share in found], len(names)))

    def restore(saved: dict[str, Any]) -> None:
        measured[0] = Intervals(**saved)

    state = lambda: dict(vars(measured[0]))
    return Hook("lost_updates", 41, begin=begin, after_step=after_step, state=state, restore=restore)


def _of_this_process(sizes: Any) -> np.ndarray[Any, Any]:
    """Returns float64[leaves, 2], the sum over the shards that this process holds."""
    parts = {str(shard.index): shard.data for shard in sizes.addressable_shards}.values()
    total: np.ndarray[Any, Any] = sum(np.asarray(x, np.float64).reshape(-1, *x.shape[-2:]).sum(0) for x in parts)
    return total


def _warning(step: int, found: list[tuple[str, float]], num: int) -> str:
    names = ", ".join(name for name, _ in found[:MAX_NAMES])
    more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return (
        f"warning: step {step}: updates do not change {len(found)} of {num} bfloat16 parameters: {names}{more}. At "
        f"least {100 * min(share for _, share in found):.3g} % of their updates are lost, since an update below 1/512 "
        "of a parameter is rounded away. Set precision.params: float32, or precision.rounding: stochastic."
    )
