"""`Retention`: which checkpoints are retained. Its keys are part of the section `checkpoint`.

To add a rule, add a field here and its steps in `steps_to_keep`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from spmdkit.config import fields
from spmdkit.config.fields import Section


class Best(Section):
    """How the best checkpoint is selected."""

    metric: fields.Name
    """Name of an evaluation metric, for example loss."""
    mode: Annotated[Literal["min", "max"], BeforeValidator(fields.best_mode)] = Field(
        default_factory=lambda: None, validate_default=True
    )
    """Whether the smallest or the largest value is best; default: min for a metric with a name that ends with loss."""


class Retention(Section):
    """Which checkpoints are retained. All other checkpoints are deleted after each save."""

    keep: fields.Count = 3
    """Number of newest checkpoints to keep, in addition to the best."""
    keep_every: fields.Count | None = None
    """Keep every checkpoint at a multiple of this number of steps; null: none."""
    best: Best | None = None
    """Save when an evaluation improves, and keep the best checkpoint. Needs eval.every_steps."""

    @property
    def best_metric(self) -> tuple[str, str] | None:
        """(metric, "min" or "max") of `best`."""
        return None if self.best is None else (self.best.metric, self.best.mode)

    def steps_to_keep(self, steps: Sequence[int], scores: Mapping[int, float | None]) -> set[int]:
        """Returns the steps to keep.

        A step without a score (the metric is missing or not finite) is never the best. Ties go to the newest step.

        Args:
            scores: step -> value of the metric of `best`.
        """
        ordered = sorted(steps)
        retained = set(ordered[-self.keep :])
        if self.keep_every is not None:
            retained.update(step for step in ordered if step % self.keep_every == 0)
        scored = [(score, step) for step in ordered if (score := scores.get(step)) is not None]
        if self.best is not None and scored:
            sign = 1.0 if self.best.mode == "max" else -1.0
            retained.add(max(scored, key=lambda pair: (sign * pair[0], pair[1]))[1])
        return retained
