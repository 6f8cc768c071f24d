"""Saves every N steps, every N seconds by the clock of process 0, after the last step, and when an evaluation is the
best so far."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from spmdkit.run.hooks.base import Action, Hook, Save

if TYPE_CHECKING:
    from spmdkit.run.run import Run


def make(config: Any) -> Hook | None:
    """Returns the hook that requests saves; None if the config disables checkpoints."""
    options = config.checkpoint
    if options is None:
        return None
    every_s, every_steps, last = options.every_seconds, options.every_steps, config.num_steps

    def after_step(run: Run, step: int, state: Any, metrics: Any) -> Action | None:
        if step == last or (every_steps is not None and step % every_steps == 0):
            return Save(known=True)
        late = (
            every_s is not None
            and run.cluster.is_main
            and run.saves is not None
            and run.clock() - run.saves.tried_at >= every_s
        )
        return Save() if late else None

    if options.best is None:
        return Hook("saving", order=30, after_step=after_step)  # type: ignore[arg-type]  # it gets a Run
    # Part of the checkpoint, so that a restarted run saves at the same steps.
    seen: dict[str, Any] = {"best": None, "step": None}

    def after_eval(run: Run, step: int, values: Any) -> Action | None:
        value, best = float(values[options.best.metric]), seen["best"]
        if not math.isfinite(value):
            return None
        better = best is None or (value < best if options.best.mode == "min" else value > best)
        if not better and not (run.saves is not None and run.saves.is_lost(seen["step"])):
            return None  # if the best is lost, the next best is saved
        seen.update(best=value, step=step)
        return Save(known=True)  # every process has the same values

    calls: dict[str, Any] = {"after_step": after_step, "after_eval": after_eval}  # they get a Run
    return Hook("saving", order=30, state=lambda: dict(seen), restore=seen.update, **calls)
