"""`Flow`: how the rows of one replica enter a value, the lattice of the analysis.

    none     rows do not enter; `degree` counts factors of the number of rows (x.shape[0] is 1, its reciprocal -1)
    row      every element depends on one row: element i on row (i // stride) % rows, in flat order
    total    a sum over rows of values of single rows: degree 1 is a sum, degree 0 a mean
    moment   a polynomial of totals, such as a variance
    max, min the largest or smallest value over rows
    other    any other function of several rows
    unknown  computed by a primitive without a rule

A value is *mixed* if a statistic of some rows changes the value of another row, or if a statistic enters other than
linearly. A mean over replicas of a mixed value differs from the value of one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

How = Literal["none", "row", "total", "moment", "max", "min", "other", "unknown"]
Tag = Literal["", "zero", "old", "grown", "index", "false", "replica", "offset"]


@dataclass(frozen=True, eq=False)
class Flow:
    """How rows enter one value.

    Attributes:
        how: see above.
        degree: power of the number of rows that the value is proportional to; None if it depends on it otherwise.
        rows, stride: of a `row` value; rows is 1 inside of a loop over rows, stride 0 if the layout is unknown.
        mixed: the equation that mixed rows of this replica, or None.
        added: the equation that added a mean over rows to the value of a row. It mixes rows unless only linear
            operations and a sum over rows follow.
        whole: the equation that read rows of other replicas, or None.
        unknown: the first equation without a rule, or None.
        source: the equation that first combined rows.
        tag: known contents. `zero`, `false`: of all elements. `old`: a multiple of the old model state. `grown`: one
            plus a value of this degree. `index`: the index of the row within the replica. `replica`: the index of the
            replica. `offset`: the position of its first row.
    """

    how: How = "none"
    degree: int | None = 0
    rows: int = 0
    stride: int = 0
    mixed: Any = None
    added: Any = None
    whole: Any = None
    unknown: Any = None
    source: Any = None
    tag: Tag = ""

    @property
    def enters(self) -> bool:
        """Whether rows of this replica enter."""
        return self.how != "none"

    @property
    def is_row(self) -> bool:
        return self.how == "row"

    @property
    def is_statistic(self) -> bool:
        """Whether the value combines several rows."""
        return self.how not in ("none", "row")

    def same_as(self, other: Flow) -> bool:
        """Returns whether two flows differ in no more than the equations that they name."""
        plain = [(f.how, f.degree, f.rows, f.stride, f.tag) for f in (self, other)]
        marked = [[x is None for x in (f.mixed, f.added, f.whole)] for f in (self, other)]
        return plain[0] == plain[1] and marked[0] == marked[1]

    def span(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Returns the first and last dim that the rows of a `row` value extend over, or None if that is unknown, if a
        dim holds parts of rows, or if there is only one row."""
        after, covering = 1, []
        for dim in reversed(range(len(shape))):
            if after < self.stride * self.rows and after * shape[dim] > self.stride:
                covering.append(dim)
            after *= shape[dim]
        if not covering or self.stride % math.prod(shape[covering[0] + 1 :]):
            return None
        return covering[-1], covering[0]

    def moved(self, shape: tuple[int, ...], out: tuple[int, ...], dims: dict[int, int]) -> Flow:
        """Returns the flow of an array of shape `out` in which dim d of this value is dim `dims[d]`."""
        span = self.span(shape)
        if span is None:
            return replace(self, stride=0)
        first, last = span
        new = [dims.get(d) for d in range(first, last + 1)]
        after, new_last = math.prod(shape[last + 1 :]), dims.get(last, -1)
        if new != list(range(new_last - (last - first), new_last + 1)):
            return replace(self, stride=0)
        return replace(self, stride=self.stride // after * math.prod(out[new_last + 1 :]))


NONE = Flow()


def first(items: Iterable[Any]) -> Any:
    """Returns the first item that is not None, or None."""
    return next((item for item in items if item is not None), None)


def marks(flows: Iterable[Flow]) -> dict[str, Any]:
    """Returns the marks of a value that is computed from `flows`: those of any of them."""
    flows = list(flows)
    return {name: first(getattr(f, name) for f in flows) for name in ("mixed", "added", "whole", "unknown", "source")}


def mixing(eqn: Any, flows: Iterable[Flow]) -> dict[str, Any]:
    """Returns the marks of a value of an equation that mixes the rows of `flows`."""
    found = marks(flows)
    return {**found, "mixed": found["mixed"] or found["source"] or eqn, "added": None}
