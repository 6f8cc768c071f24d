"""Ends the run after `patience` evaluations without an improvement of a metric by more than `min_delta`. The state is
saved, and the run is finished. `checkpoint: {best: ...}` keeps the best state (Keras and Lightning: EarlyStopping).
"""

from __future__ import annotations

from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.run.common_hooks.improvement import Improvement, Mode
from spmdkit.run.hooks.base import Action, Hook, Metrics, RunView, Stop


def make(metric: str = "loss", mode: Mode = "min", patience: int = 3, min_delta: float = 0.0) -> Hook:
    """Returns the hook."""
    if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
        raise ConfigError(
            f"early_stopping: patience is {patience!r}. It is a number of evaluations. Write patience: 3."
        )
    improvement = Improvement("early_stopping", metric, mode, min_delta)

    def begin(run: RunView, step: int, state: Any) -> None:
        improvement.check(run)

    def after_eval(run: RunView, step: int, values: Metrics) -> Action | None:
        if improvement.add(step, values) < patience:
            return None
        return Stop(why=f"early_stopping: {improvement}", known=True)  # every process has the same values

    state, restore = lambda: dict(improvement.state), improvement.state.update
    return Hook("early_stopping", begin=begin, after_eval=after_eval, state=state, restore=restore)
