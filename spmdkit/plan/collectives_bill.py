"""The bill of collectives: the bytes that one device sends in one step, read from the compiled program.

Bytes *sent* by one device per step with ring algorithms, for a group of N devices and `size` bytes:

| op                  | bytes sent            | `size`                                            |
| ------------------- | --------------------- | ------------------------------------------------- |
| all_reduce          | 2 (N-1)/N * size      | input and output of a device (mean after a cast)  |
| all_gather          | (N-1)/N * size        | output of a device                                |
| reduce_scatter      | (N-1)/N * size        | input of a device                                 |
| all_to_all          | (N-1)/N * size        | input of a device                                 |
| ragged_all_to_all   | (N-1)/N * size        | input of a device, at most                        |
| collective_permute  | size                  | input of a device that has a target               |
| broadcast           | size                  | input of the root                                 |

If devices differ, the figure is the maximum. A group of one device sends nothing. Bytes are multiplied by trip counts
of loops; with an unknown one `bytes` is None and `bytes_at_least` counts the loop once. For a conditional, the branch
that sends most is counted. A combined collective (a tuple of arrays) is one operation with the sum of the sizes.

Source: NCCL tests, doc/PERFORMANCE.md (bus bandwidth factors); "How to Scale Your Model", "Sharded matrices",
jax-ml.github.io/scaling-book.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from spmdkit.foundation.formatting import columns, format_bytes, shown, shown_axes
from spmdkit.plan.attribution import Leaf, strategy_of
from spmdkit.plan.hlo import loops
from spmdkit.plan.hlo.collectives import OPS, HloCollective, hlo_collectives
from spmdkit.plan.hlo.text import Module

__all__ = ["OPS", "Bill", "Collective", "read_bill"]

_ROW = (
    "op", "axes", "dtype", "bytes", "bytes_at_least", "count", "in_loop", "trip_count", "group_size", "source",
    "op_name", "cause", "branch", "counted", "emulated_op",
)  # fmt: skip
_SAME = operator.attrgetter(
    "op", "axes", "dtype", "in_loop", "trip_count", "source", "cause", "branch", "counted", "is_async", "emulated_op"
)


@dataclass(frozen=True, kw_only=True)
class Collective(HloCollective):
    """One collective operation of the program, or several that differ only in their names and arrays.

    Attributes:
        bytes: sent by one device per step; None with an unknown trip count.
        bytes_at_least: the same with every unknown trip count counted as one.
        count: number of operations in this row.
        in_loop: whether it runs inside a `while`.
        trip_count: executions per step, all loops multiplied; None if unknown.
        cause: the part of the strategy that needs it, one of `attribution.CAUSES`.
        branch: whether it is inside a conditional.
        counted: False in a branch that is not the most expensive one: its bytes are not in the totals.
    """

    bytes: int | None
    bytes_at_least: int
    count: int = 1
    in_loop: bool
    trip_count: int | None
    cause: str
    branch: bool = False
    counted: bool = True

    @property
    def bytes_once(self) -> int:
        """Bytes that one device sends in one execution."""
        return round(self.size * _factor(self.op, self.group_size))

    def as_json(self) -> dict[str, Any]:
        """Returns the row of `plan --json`."""
        return {name: getattr(self, name) for name in _ROW} | {"axes": list(map(shown, self.axes))}


@dataclass(frozen=True)
class Bill:
    """All collectives of a program.

    Attributes:
        collectives: one entry per operation, in schedule order; collectives over groups of one device are omitted.
        sizes: mesh axis -> size, in mesh order.
    """

    collectives: tuple[Collective, ...]
    sizes: Mapping[str, int]

    @property
    def bytes(self) -> int | None:
        """Bytes that one device sends per step; None if a trip count is unknown."""
        return _total(self.collectives)

    @property
    def bytes_at_least(self) -> int:
        """The same with every unknown trip count counted as one."""
        return sum(c.bytes_at_least for c in self.collectives if c.counted)

    @functools.cached_property
    def rows(self) -> tuple[Collective, ...]:
        """One row for all operations that differ only in their names and arrays; most bytes first."""
        together: dict[Any, list[Collective]] = {}
        for c in self.collectives:
            together.setdefault(_SAME(c), []).append(c)
        return tuple(sorted(map(_merge, together.values()), key=lambda c: -c.bytes_at_least))

    def __str__(self) -> str:
        rows = [("collective", "axes", "bytes", "runs", "line")]
        for c in self.rows:
            runs = f"{c.count} x {c.trip_count or '?'}"
            rows.append((f"{c.op} {c.dtype}", shown_axes(c.axes), format_bytes(c.bytes_at_least), runs, c.source or ""))
        more = "" if self.bytes is not None else ", at least: the length of a loop is unknown"
        total = f"{format_bytes(self.bytes_at_least)} sent per device and step{more}"
        return "\n".join([total, *(columns(rows, (2,)) if self.rows else ())])

    def by(self, name: str) -> dict[Any, int | None]:
        """Returns value of an attribute (`axes`, `cause`) -> bytes that one device sends per step (None: unknown), most
        bytes first."""
        parts: dict[Any, list[Collective]] = defaultdict(list)
        for c in self.collectives:
            if c.counted:
                parts[getattr(c, name)].append(c)
        order = sorted(parts, key=lambda value: -sum(c.bytes_at_least for c in parts[value]))
        return {value: _total(parts[value]) for value in order}


def read_bill(
    module: Module,
    sizes: Mapping[str, int],
    leaves: Sequence[Leaf] = (),
    scans: Mapping[str, int] | None = None,
) -> Bill:
    """Returns the bill of a compiled program.

    Args:
        sizes: size of every mesh axis, in mesh order (`Program.sizes`).
        leaves: the parameters, to attribute collectives (`attribution.leaves_of(program)`).
        scans: op_name -> length of the scans in the jaxpr, for loops without a trip count in the HLO text.
    """
    collectives = []
    for visit, c in hlo_collectives(module, sizes, loops.walk(module, scans)):
        if factor := _factor(c.op, c.group_size):
            at_least = round(c.size * factor * visit.known_runs)
            collective = Collective(
                **vars(c),
                bytes=None if visit.runs is None else at_least,
                bytes_at_least=at_least,
                in_loop=bool(visit.loops),
                trip_count=visit.runs,
                cause=strategy_of(module, c, visit, leaves),
                branch=bool(visit.branches),
            )
            collectives.append((visit.branches, collective))
    return Bill(tuple(_most_expensive_branches(collectives)), dict(sizes))


def _factor(op: str, n: int) -> Fraction:
    """Returns bytes sent / `size` for a group of n devices; a permutation that moves no data has groups of one."""
    if n < 2:
        return Fraction(0)
    return {"all_reduce": Fraction(2 * (n - 1), n), "broadcast": Fraction(1), "collective_permute": Fraction(1)}.get(
        op, Fraction(n - 1, n)
    )


def _most_expensive_branches(rows: Sequence[tuple[Any, Collective]]) -> Iterable[Collective]:
    """Marks the collectives in all but the most expensive branch of each conditional as not counted, inner conditionals
    first."""
    outside: set[int] = set()
    for depth in reversed(range(max((len(branches) for branches, _ in rows), default=0))):
        inside = {i: branches for i, (branches, _) in enumerate(rows) if len(branches) > depth and i not in outside}
        costs: dict[Any, Counter[int]] = defaultdict(Counter)
        for i, branches in inside.items():
            conditional, number = branches[depth]
            costs[*branches[:depth], conditional][number] += rows[i][1].bytes_at_least
        for i, branches in inside.items():
            of_branches = costs[*branches[:depth], branches[depth][0]]
            if branches[depth][1] != max(of_branches, key=lambda number: of_branches[number]):
                outside.add(i)
    return [dataclasses.replace(c, counted=i not in outside) for i, (_, c) in enumerate(rows)]


def _total(collectives: Iterable[Collective]) -> int | None:
    counted = [c.bytes for c in collectives if c.counted]
    return None if any(b is None for b in counted) else sum(b for b in counted if b is not None)


def _merge(same: Sequence[Collective]) -> Collective:
    first = same[0]
    return dataclasses.replace(
        first,
        size=sum(c.size for c in same),
        bytes=None if first.bytes is None else sum(c.bytes or 0 for c in same),
        bytes_at_least=sum(c.bytes_at_least for c in same),
        count=sum(c.count for c in same),
        group_size=max(c.group_size for c in same),
        names=tuple(name for c in same for name in c.names),
        shapes=tuple(shape for c in same for shape in c.shapes),
    )
