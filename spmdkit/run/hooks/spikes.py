"""Sets the limit above which a loss is a spike; finite.py applies it. The limit is the median of the previous losses
plus `on_spike.z_score` robust deviations:

    deviation = 1.4826 x the median distance from the median, and at least FLOOR of the median

Spikes do not affect later limits. The limit is set at log steps, the same on every process, and is part of the
checkpoint, so a restarted run is bitwise identical.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from spmdkit.program.feeds import placed_limit
from spmdkit.run.hooks.base import Hook, RunView

FLOOR = 0.01


def make(config: Any) -> Hook | None:
    """Returns the hook that sets the limit; None if the config has no `on_spike`."""
    options = config.on_spike
    if options is None:
        return None
    window: collections.deque[float] = collections.deque(maxlen=options.window)
    limit: list[float | None] = [None]
    waiting: list[tuple[int, Any]] = []  # (step, loss on the devices)
    stale = [True]  # after a rollback

    def read(run: RunView | None = None) -> None:
        steps, losses = [step for step, _ in waiting], jax.device_get([loss for _, loss in waiting])
        waiting.clear()
        for step, loss in zip(steps, map(float, losses), strict=True):
            if limit[0] is not None and loss > limit[0]:
                if options.action == "continue" and run is not None:
                    run.message(f"a spike at step {step}: the loss is {loss:.4g}, above {limit[0]:.4g}")
            elif math.isfinite(loss):
                window.append(loss)

    def put(run: RunView) -> None:
        run.program.limit = placed_limit(run.program.mesh, limit[0])
        stale[0] = False

    def before_step(run: RunView, step: int, state: Any) -> None:
        if stale[0]:
            waiting.clear()
            put(run)

    def after_step(run: RunView, step: int, state: Any, metrics: Any) -> None:
        if "loss" in metrics:
            waiting.append((step, metrics["loss"]))
        if run.is_log_step(step):
            read(run)
            if len(window) >= options.window // 4:
                limit[0] = limit_of(window, options.z_score)
            put(run)

    def saved() -> dict[str, Any]:
        read()
        return {"window": list(window), "limit": limit[0]}

    def restore(saved: dict[str, Any]) -> None:
        window.clear()
        window.extend(saved["window"])
        limit[0], stale[0] = saved["limit"], True

    return Hook("spikes", order=12, before_step=before_step, after_step=after_step, state=saved, restore=restore)


def limit_of(losses: Iterable[float], z: float) -> float:
    """Returns the loss above which the next one is a spike, given the previous `losses`."""
    x = np.asarray(list(losses), np.float64)
    median = float(np.median(x))
    deviation = 1.4826 * float(np.median(np.abs(x - median)))
    return median + z * max(deviation, FLOOR * abs(median))
