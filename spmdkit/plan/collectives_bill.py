"""The bill of collectives: what one device sends over the links in one step, read from the compiled program.

Bytes are what one device *sends* per step with ring algorithms, for a group of N devices and `size` bytes:

| op                  | bytes sent            | `size`                                            |
| ------------------- | --------------------- | ------------------------------------------------- |
| all_reduce          | 2 (N-1)/N * size      | input and output of a device (mean after a cast)  |
| all_gather          | (N-1)/N * size        | output of a device                                |
| reduce_scatter      | (N-1)/N * size        | input of a device                                 |
| all_to_all          | (N-1)/N * size        | input of a device                                 |
| ragged_all_to_all   | (N-1)/N * size        | input of a device, at most                        |
| collective_permute  | size                  | input of a device that has a target               |
| broadcast           | size                  | input of the root                                 |

Where devices differ it is the most that any device sends. A group of one device costs nothing. Trip counts of loops are
multiplied in; under an unknown one `bytes` is None and `bytes_at_least` counts the loop once. Of a conditional, the
branch that sends most is counted. A combined collective (a tuple of arrays) is one operation with the sum of the sizes.

Source: NCCL tests, doc/PERFORMANCE.md (bus bandwidth factors); "How to Scale Your Model", "Sharded matrices",
jax-ml.github.io/scaling-book.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from spmdkit.plan.attribution import Leaf, strategy_of
from spmdkit.plan.hlo import loops
from spmdkit.plan.hlo.collectives import OPS, hlo_collectives
from spmdkit.plan.hlo.groups import Groups
from spmdkit.plan.hlo.text import Module, Shape

__all__ = ["OPS", "Bill", "Collective", "read_bill"]


@dataclass(frozen=True)
class Collective:
    """One collective operation of the program.

    Attributes:
        op: one of `OPS`.
        axes: mesh axes along which the devices of a group differ, in the mesh's order.
        spans: positions of each of these axes in one group; less than the axis is long where only a part of it takes
            part.
        dtype: of the largest array, as XLA spells it (`f32`, `bf16`).
        size: bytes of the arrays in the table above, once.
        bytes: sent by one device per step; None under an unknown trip count.
        bytes_at_least: the same with every unknown trip count taken as one.
        count: operations of the program that this row stands for.
        in_loop: whether a `while` is around it.
        trip_count: executions per step, all loops multiplied; None where unknown.
        group_size: devices of one group (the largest).
        groups: logical device numbers (places in the flattened mesh); for collective_permute the (source, target)
            pairs.
        source: `file.py:12` of the user's line, or of the line in spmdkit behind it; None if XLA created it.
        op_name: the path of JAX's names.
        cause: the strategy behind it, one of `cause.CAUSES`.
        is_async: started and awaited apart, so that other work can overlap.
        branch: inside a conditional.
        counted: False on a branch that is not the most expensive one: its bytes are not in the totals.
        names: the HLO instructions.
        loop_names: the HLO `while` instructions around it, outermost first.
        shapes: the arrays that each device puts in.
        algorithm: the backend's algorithm, if it reports one.
        emulated_op: the cheaper op that this all_reduce emulates (`all_gather`, `reduce_scatter`), or None.
    """

    op: str
    axes: tuple[str, ...]
    dtype: str
    size: int
    bytes: int | None
    bytes_at_least: int
    count: int
    in_loop: bool
    trip_count: int | None
    group_size: int
    source: str | None
    op_name: str
    cause: str
    is_async: bool = False
    branch: bool = False
    counted: bool = True
    spans: Mapping[str, int] = field(default_factory=dict)
    groups: Groups = field(default=(), repr=False)
    names: tuple[str, ...] = ()
    loop_names: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    algorithm: str | None = None
    emulated_op: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the row of `plan --json`."""
        return {
            "op": self.op,
            "axes": list(self.axes),
            "dtype": self.dtype,
            "bytes": self.bytes,
            "bytes_at_least": self.bytes_at_least,
            "count": self.count,
            "in_loop": self.in_loop,
            "trip_count": self.trip_count,
            "group_size": self.group_size,
            "source": self.source,
            "op_name": self.op_name,
            "cause": self.cause,
            "branch": self.branch,
            "counted": self.counted,
            "emulated_op": self.emulated_op,
        }


@dataclass(frozen=True)
class Bill:
    """All collectives of a program.

    Attributes:
        collectives: one for each operation, in the order of the schedule; those over groups of one device are left out.
        sizes: mesh axis -> size, in the mesh's order.
    """

    collectives: tuple[Collective, ...]
    sizes: Mapping[str, int]

    @property
    def bytes(self) -> int | None:
        """Bytes that one device sends per step; None where a trip count is unknown."""
        return _total(self.collectives)

    @property
    def bytes_at_least(self) -> int:
        """The same with every unknown trip count taken as one."""
        return sum(c.bytes_at_least for c in self.collectives if c.counted)

    @property
    def num_in_loops(self) -> int:
        """Operations inside loops."""
        return sum(c.count for c in self.collectives if c.in_loop)

    @functools.cached_property
    def rows(self) -> tuple[Collective, ...]:
        """Operations that differ in nothing but their names and arrays, as one row each; most bytes first."""
        together: dict[Any, list[Collective]] = {}
        for c in self.collectives:
            key = (
                c.op,
                c.axes,
                c.dtype,
                c.in_loop,
                c.trip_count,
                c.source,
                c.cause,
                c.branch,
                c.counted,
                c.is_async,
                c.emulated_op,
            )
            together.setdefault(key, []).append(c)
        return tuple(sorted(map(_merge, together.values()), key=lambda c: -c.bytes_at_least))

    def by_axes(self) -> dict[tuple[str, ...], int | None]:
        """Returns axes -> bytes that one device sends along them per step (None: unknown), most first."""
        return self._by(lambda c: c.axes)

    def by_cause(self) -> dict[str, int | None]:
        """Returns cause -> bytes that one device sends per step (None: unknown), most first."""
        return self._by(lambda c: c.cause)

    def _by(self, key: Any) -> dict[Any, int | None]:
        parts: dict[Any, list[Collective]] = {}
        for c in self.collectives:
            if c.counted:
                parts.setdefault(key(c), []).append(c)
        order = sorted(parts, key=lambda k: -sum(c.bytes_at_least for c in parts[k]))
        return {k: _total(parts[k]) for k in order}

    def over(self, *axes: str, op: str | None = None) -> tuple[Collective, ...]:
        """Returns the collectives (of one `op`) that join devices along any of `axes`."""
        return tuple(c for c in self.collectives if set(axes) & set(c.axes) and op in (None, c.op))


def read_bill(
    module: Module,
    sizes: Mapping[str, int],
    leaves: Sequence[Leaf] = (),
    scans: Mapping[str, int] | None = None,
) -> Bill:
    """Returns the bill of a compiled program.

    Args:
        sizes: size of every mesh axis in the mesh's order (`Program.sizes`).
        leaves: the parameters, to attribute collectives (`cause.leaves_of(program)`).
        scans: op_name -> length of the scans in the jaxpr, for loops without a trip count in the text.
    """
    found = []
    for visit, c in hlo_collectives(module, sizes, loops.walk(module, scans)):
        factor = _factor(c.op, c.group_size)
        if not factor:
            continue
        exact = c.size * factor * visit.known_runs
        at_least = round(exact)
        found.append(
            (
                visit.branches,
                Collective(
                    op=c.op,
                    axes=tuple(c.spans),
                    dtype=c.dtype,
                    size=c.size,
                    bytes=None if visit.runs is None else at_least,
                    bytes_at_least=at_least,
                    count=1,
                    in_loop=bool(visit.loops),
                    trip_count=visit.runs,
                    group_size=c.group_size,
                    source=c.source,
                    op_name=c.op_name,
                    cause=strategy_of(module, c, visit, leaves),
                    is_async=c.is_async,
                    branch=bool(visit.branches),
                    spans=c.spans,
                    groups=c.groups,
                    names=(c.instruction.name,),
                    loop_names=tuple(loop.name for loop in visit.loops),
                    shapes=c.shapes,
                    algorithm=c.algorithm,
                    emulated_op=c.emulated_op,
                ),
            )
        )
    return Bill(tuple(_dearest_branches(found)), dict(sizes))


def _factor(op: str, n: int) -> Fraction:
    """Returns bytes sent over `size` for a group of n devices; a permutation that moves nothing has groups of one."""
    if n < 2:
        return Fraction(0)
    return {"all_reduce": Fraction(2 * (n - 1), n), "broadcast": Fraction(1), "collective_permute": Fraction(1)}.get(
        op, Fraction(n - 1, n)
    )


def _dearest_branches(found: Sequence[tuple[Any, Collective]]) -> Iterable[Collective]:
    """Marks the collectives of every branch that is not its conditional's most expensive one as not counted."""
    outside: set[int] = set()

    def cost(conditional: Any, number: int, depth: int) -> int:
        inside = [
            i
            for i, (branches, _) in enumerate(found)
            if len(branches) > depth and branches[depth] == (conditional, number)
        ]
        settle(inside, depth + 1)
        return sum(found[i][1].bytes_at_least for i in inside if i not in outside)

    def settle(indices: Iterable[int], depth: int) -> None:
        conditionals: dict[int, tuple[Any, dict[int, list[int]]]] = {}
        for i in indices:
            branches = found[i][0]
            if len(branches) > depth:
                conditional, number = branches[depth]
                conditionals.setdefault(id(conditional), (conditional, {}))[1].setdefault(number, []).append(i)
        for conditional, numbers in conditionals.values():
            costs = {number: cost(conditional, number, depth) for number in numbers}
            best = max(costs, key=lambda number: costs[number])
            outside.update(i for number, inside in numbers.items() if number != best for i in inside)

    settle(range(len(found)), 0)
    return [dataclasses.replace(c, counted=i not in outside) for i, (_, c) in enumerate(found)]


def _total(collectives: Iterable[Collective]) -> int | None:
    counted = [c.bytes for c in collectives if c.counted]
    return None if any(b is None for b in counted) else sum(b for b in counted if b is not None)


def _merge(same: Sequence[Collective]) -> Collective:
    first = same[0]
    if len(same) == 1:
        return first
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
