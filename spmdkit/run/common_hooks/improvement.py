"""The best value of a metric of the evaluation, and the number of evaluations since."""

from __future__ import annotations

import math
from typing import Any, Literal

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest
from spmdkit.run.hooks.base import Metrics, RunView

Mode = Literal["min", "max"]


class Improvement:
    """Counts the evaluations without an improvement of at least `min_delta`.

    Attributes:
        state: JSON values, part of a checkpoint: the best value, its step, the evaluations `since`.
    """

    def __init__(self, hook: str, metric: str, mode: Mode, min_delta: float) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"{hook}: mode is {mode!r}. It is min or max. Write mode: min for a loss.")
        self.hook, self.metric, self._mode, self._min_delta = hook, metric, mode, min_delta
        self.state: dict[str, Any] = {"best": None, "step": 0, "since": 0}

    def check(self, run: RunView) -> None:
        """Raises ConfigError if the run does not evaluate the metric during training."""
        start = f"hooks: {self.hook} follows '{self.metric}' of the evaluation"
        if not run.program.has_eval:
            raise ConfigError(f"{start}, and the task has no eval_data. Pass Task(eval_data=...).")
        if run.config.eval.every_steps is None:
            raise ConfigError(f"{start}, which runs after the last step only. Write eval: {{every_steps: 100}}.")
        names = run.program.evaluator.names
        if self.metric not in names:
            raise ConfigError(
                f"{start}, but the evaluation has {', '.join(names)}.{nearest(self.metric, names)} Use one of them."
            )

    def add(self, step: int, values: Metrics) -> int:
        """Adds an evaluation. Returns the number of evaluations since the last improvement, 0 after one."""
        value, best = float(values[self.metric]), self.state["best"]
        sign = 1 if self._mode == "min" else -1
        better = best is None or sign * value < sign * best - self._min_delta
        if better and math.isfinite(value):
            self.state.update(best=value, step=step, since=0)
        else:
            self.state["since"] += 1
        return int(self.state["since"])

    def __str__(self) -> str:
        best = (
            "never finite" if self.state["best"] is None else f"{self.state['best']:.6g} at step {self.state['step']}"
        )
        return f"{self.metric} was best ({best}) {self.state['since']} evaluations ago"
