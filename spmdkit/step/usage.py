"""`UsageTracker`: the functions and axes that the user's code has used in a trace.

It only grows, so that a function that is traced twice, or not again because JAX has cached its trace, has the same
effect. Facts about one call of `sk.value_and_grad` are returned by that call instead (accumulator.py, `LossFacts`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

Function = Literal[
    "value_and_grad",
    "mean",
    "example_mask",
    "example_keys",
    "all_gather",
    "ema",
    "optimizer",
    "remat",
    "attention",
    "context_order",
    "pipeline",
]
"""Recorded functions of spmdkit; `mean` stands for every metric, `ema` for a new average of the parameters, `optimizer`
for its update."""


@dataclass
class UsageTracker:
    """What the user's code has called and named.

    Attributes:
        functions: of spmdkit that it has called.
        axes: mesh axes that it has named for activations.
        marks: names of values inside recomputed functions (`checkpoint_name`).
        num_masked: metrics that have excluded padding rows from their values.
    """

    functions: set[str] = field(default_factory=set)
    axes: set[str] = field(default_factory=set)
    marks: set[str] = field(default_factory=set)
    num_masked: int = 0

    def record_call(self, function: Function) -> None:
        """Records a call."""
        assert function in get_args(Function), f"'{function}' is not a recorded function"
        self.functions.add(function)

    def has_called(self, *functions: Function) -> bool:
        """Returns whether any of the functions was called."""
        return not self.functions.isdisjoint(functions)

    def record_axes(self, *names: str) -> None:
        """Records mesh axes that were named for activations."""
        self.axes.update(names)

    def record_name(self, name: str) -> None:
        """Records the name of a value inside a recomputed function."""
        self.marks.add(name)

    def record_masked_metric(self) -> None:
        """Records a metric that has excluded padding rows from values with the rows as first dim."""
        self.num_masked += 1

    def without(self, function: Function) -> UsageTracker:
        """Returns a copy without calls of `function`."""
        return UsageTracker(self.functions - {function}, set(self.axes), set(self.marks), self.num_masked)

    def merge_from(self, other: UsageTracker) -> None:
        """Adds everything that a copy of this has recorded since."""
        self.functions |= other.functions
        self.axes |= other.axes
        self.marks |= other.marks
        self.num_masked = max(self.num_masked, other.num_masked)
