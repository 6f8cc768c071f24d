"""`UsageTracker`: what a trace has noticed of the user's code. Besides the results of a trace and `ReducerSlots` nothing else
leaves it.
What one call of `sk.value_and_grad` notes of its own loss (gradient.py: whether a count depends on the parameters) ends
with that call: here it would be said of the step's other calls too.

It only ever grows, so that a function that is traced twice, or not again where JAX has kept its trace, says the same.
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
"""Functions of spmdkit whose call is noticed; `mean` stands for every metric, `ema` for a new average of the
parameters, `optimizer` for its update."""


@dataclass
class UsageTracker:
    """What the user's code has called and named.

    Attributes:
        functions: of spmdkit that it has called.
        axes: mesh axes that it has named for activations.
        marks: names that it has given to values inside of what is computed again (`checkpoint_name`).
        num_masked: metrics that have left padding rows out of their values.
    """

    functions: set[str] = field(default_factory=set)
    axes: set[str] = field(default_factory=set)
    marks: set[str] = field(default_factory=set)
    num_masked: int = 0

    def record_call(self, function: Function) -> None:
        """Notes a call."""
        assert function in get_args(Function), f"'{function}' stands in no table: nobody would ask for it"
        self.functions.add(function)

    def has_called(self, *functions: Function) -> bool:
        """Returns whether any of the functions was called."""
        return not self.functions.isdisjoint(functions)

    def record_axes(self, *names: str) -> None:
        """Notes mesh axes that were named for activations."""
        self.axes.update(names)

    def record_name(self, name: str) -> None:
        """Notes the name of a value inside of what is computed again."""
        self.marks.add(name)

    def record_masked_metric(self) -> None:
        """Notes a metric that has left padding rows out of values whose first dim is as long as the rows."""
        self.num_masked += 1

    def without(self, function: Function) -> UsageTracker:
        """Returns a copy that has not noticed calls of `function`."""
        return UsageTracker(self.functions - {function}, set(self.axes), set(self.marks), self.num_masked)

    def merge_from(self, other: UsageTracker) -> None:
        """Takes over what a copy of this has noticed since."""
        self.functions |= other.functions
        self.axes |= other.axes
        self.marks |= other.marks
        self.num_masked = max(self.num_masked, other.num_masked)
