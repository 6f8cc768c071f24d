"""How often each instruction of a compiled program runs in one step: loops, calls, branches.

The trip count of a loop is determined, in this order, by: the compiler's annotation (`known_trip_count`, CPU); the
condition of the loop (an induction variable with a constant start, step and bound: the TPU compiler emits no
annotation); the length of the scan in the jaxpr with the loop's name. Otherwise it is unknown (None): it depends on
data and is never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from spmdkit.plan.hlo.text import SAME, Computation, Instruction, Module

_SAME = (*SAME, "opt-barrier", "optimization-barrier")
CALLS = {
    "fusion": "calls",
    "call": "to_apply",
    "async-start": "calls",
    "call-start": "to_apply",
    "custom-call": "called_computations",
}
"""Operation -> the role of the computations that it runs once."""
_DEPTH = 64


@dataclass(frozen=True, eq=False)
class Site:
    """A call site of a computation: the calling instruction, and the site of that instruction."""

    caller: Instruction
    outer: Site | None


class Visit(NamedTuple):
    """One instruction at one site of the program.

    Attributes:
        runs: executions per step; None if an enclosing loop has an unknown trip count.
        known_runs: the same with every unknown trip count counted as one.
        loops: the enclosing `while` instructions, outermost first.
        branches: the enclosing (conditional, branch index) pairs, outermost first.
    """

    instruction: Instruction
    runs: int | None = 1
    known_runs: int = 1
    loops: tuple[Instruction, ...] = ()
    branches: tuple[tuple[Instruction, int], ...] = ()
    site: Site | None = None


def walk(module: Module, scans: Mapping[str, int] | None = None) -> Iterator[Visit]:
    """Yields every instruction at every site where it runs, in schedule order.

    Reducers (`to_apply` of a reduction) are not entered: the cost of the caller includes them. The condition of a loop
    runs once more than its body.

    Args:
        scans: op_name -> length, from `jaxpr_lines.scan_lengths`.
    """
    scans = scans or {}

    def visit(computation: Computation, around: Visit) -> Iterator[Visit]:
        for i in computation.instructions:
            here = around._replace(instruction=i)
            yield here
            inside = here._replace(site=Site(i, here.site))
            if i.opcode == "while":
                trips = trip_count(module, i, here.site, scans)
                for role, extra in (("body", 0), ("condition", 1)):
                    runs = None if trips is None or here.runs is None else here.runs * (trips + extra)
                    known = here.known_runs * (1 if trips is None else trips + extra)
                    of_loop = inside._replace(runs=runs, known_runs=known, loops=(*here.loops, i))
                    for name in i.called.get(role, ()):
                        yield from visit(module.computations[name], of_loop)
            elif i.opcode == "conditional":
                for number, name in enumerate(i.called.get("branch_computations", ())):
                    branches = (*here.branches, (i, number))
                    yield from visit(module.computations[name], inside._replace(branches=branches))
            elif i.opcode in CALLS:
                for name in i.called.get(CALLS[i.opcode], ()):
                    if name in module.computations:
                        yield from visit(module.computations[name], inside)

    yield from visit(module.entry, Visit(module.entry.root))


# ---- trip counts -----------------------------------------------------------------------------------------------------


def trip_count(
    module: Module, loop: Instruction, site: Site | None = None, scans: Mapping[str, int] | None = None
) -> int | None:
    """Returns how often the body of a `while` runs, or None if that is not known before it runs."""
    written = loop.backend_config.get("known_trip_count", {}).get("n")
    if written is not None:
        return int(written)
    counted = _from_condition(module, loop, site)
    if counted is not None:
        return counted
    return (scans or {}).get(loop.op_name)


class _Affine(NamedTuple):
    """A scalar integer: `element` of the loop's carry (None: no element) plus `offset`."""

    element: int | None
    offset: int


class _Scope(NamedTuple):
    """The scope of an instruction: inside a called computation, parameters are the operands of `caller` in `outer`."""

    computation: Computation
    loop: Instruction | None = None
    caller: Instruction | None = None
    outer: _Scope | None = None


def _from_condition(module: Module, loop: Instruction, site: Site | None) -> int | None:
    condition, body = (module.computations[loop.called[role][0]] for role in ("condition", "body"))
    comparison = _comparison(module, condition.root, _Scope(condition, loop))
    if comparison is None:
        return None
    left, right, direction = comparison
    if right.element is not None and left.element is None:
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if left.element is None:
        return None
    bound = _entry_value(module, loop, site, right)
    start = _entry_value(module, loop, site, _Affine(left.element, 0), invariant=False)
    after = _value(module, body.root, left.element, _Scope(body, loop))
    if bound is None or start is None or after is None or after.element != left.element:
        return None
    return _count(start + left.offset, bound, after.offset, direction)


def _count(start: int, bound: int, stride: int, direction: str) -> int | None:
    if direction in ("GT", "GE"):
        start, bound, stride = -start, -bound, -stride
        direction = {"GT": "LT", "GE": "LE"}[direction]
    if direction == "NE":
        exact = stride and (bound - start) % stride == 0 and (bound - start) // stride >= 0
        return (bound - start) // stride if exact else None
    if direction not in ("LT", "LE"):
        return None
    bound += direction == "LE"
    if start >= bound:
        return 0
    return -((start - bound) // stride) if stride > 0 else None


def _comparison(module: Module, i: Instruction | None, place: _Scope) -> tuple[_Affine, _Affine, str] | None:
    """Returns (left, right, direction) if an instruction is one comparison of integers."""
    if i is None:
        return None
    if i.opcode == "compare":
        left, right = (_value(module, place.computation.operand(i, n), None, place) for n in (0, 1))
        direction = i.attribute("direction")
        return None if left is None or right is None or direction is None else (left, right, direction)
    if inner := _called(module, i):
        return _comparison(module, inner.root, _Scope(inner, None, i, place))
    return _comparison(module, place.computation.operand(i), place) if i.opcode in _SAME else None


def _called(module: Module, i: Instruction) -> Computation | None:
    names = i.called.get(CALLS.get(i.opcode, ""))
    return module.computations[names[0]] if names else None


def _value(
    module: Module, i: Instruction | None, index: int | None, place: _Scope, depth: int = _DEPTH
) -> _Affine | None:
    """Returns a scalar integer, or element `index` of a tuple, as an element of the loop's carry plus a constant."""
    if i is None or not depth:
        return None
    operand: Callable[[int, int | None], _Affine | None] = lambda n, index: _value(
        module, place.computation.operand(i, n), index, place, depth - 1
    )
    if i.opcode in _SAME:
        return operand(0, index)
    if i.opcode == "parameter":
        if place.loop is not None:
            return None if index is None else _Affine(index, 0)
        if place.caller is None or place.outer is None:
            return None
        source = place.outer.computation.operand(place.caller, int(i.text))
        return _value(module, source, index, place.outer, depth - 1)
    if inner := _called(module, i):
        return _value(module, inner.root, index, _Scope(inner, None, i, place), depth - 1)
    if index is not None:
        if i.opcode == "tuple":
            return operand(index, None)
        return operand(0, index) if i.opcode == "while" and _is_passed_through(module, i, index) else None
    if i.opcode == "constant":
        text = i.text.strip()
        return _Affine(None, int(text)) if text.lstrip("-").isdigit() else None
    if i.opcode == "get-tuple-element":
        return operand(0, int(i.attribute("index") or 0))
    if i.opcode not in ("add", "subtract"):
        return None
    left, right = operand(0, None), operand(1, None)
    if left is None or right is None or (right.element is not None and (left.element is not None or i.opcode != "add")):
        return None
    sign = 1 if i.opcode == "add" else -1
    return _Affine(right.element if left.element is None else left.element, left.offset + sign * right.offset)


def _is_passed_through(module: Module, loop: Instruction, index: int) -> bool:
    """Returns whether a loop passes an element of its carry through unchanged."""
    body = module.computations[loop.called["body"][0]]
    return _value(module, body.root, index, _Scope(body, loop)) == _Affine(index, 0)


def _entry_value(
    module: Module, loop: Instruction, site: Site | None, value: _Affine, invariant: bool = True
) -> int | None:
    """Returns the integer of a value at loop entry; with `invariant`, only if the loop does not change it."""
    if value.element is None:
        return value.offset
    if invariant and not _is_passed_through(module, loop, value.element):
        return None
    around = module.around(loop)
    outer = site.caller if site is not None and site.caller.opcode == "while" else None
    first = _value(module, around.operand(loop), value.element, _Scope(around, outer))
    if first is None:
        return None
    if outer is None or site is None:
        return first.offset + value.offset if first.element is None else None
    start = _entry_value(module, outer, site.outer, first)
    return None if start is None else start + value.offset
