"""How often each instruction of a compiled program runs in one step: loops, calls, branches.

The trip count of a loop is, in this order: what the compiler wrote down (`known_trip_count`, CPU); the loop's own
condition (an induction variable with a constant start, step and bound: the TPU compiler writes nothing down); the
length of the scan in the jaxpr that has the loop's name. Else it is unknown (None): it depends on data, and is never
guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from spmdkit.plan.hlo.text import Computation, Instruction, Module

_SAME = ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start", "opt-barrier", "optimization-barrier")
_CALLS = {
    "fusion": "calls",
    "call": "to_apply",
    "async-start": "calls",
    "call-start": "to_apply",
    "custom-call": "called_computations",
}
_DEPTH = 64


@dataclass(frozen=True, eq=False)
class Site:
    """A place from which a computation is entered: the instruction that does it, and the place where that one runs."""

    caller: Instruction
    outer: Site | None


class Visit(NamedTuple):
    """One instruction at one place of the program.

    Attributes:
        runs: executions per step; None where a loop around it has an unknown trip count.
        known_runs: the same with every unknown trip count taken as one.
        loops: the `while` instructions around it, outermost first.
        branches: (conditional, number of the branch) around it, outermost first.
    """

    instruction: Instruction
    runs: int | None
    known_runs: int
    loops: tuple[Instruction, ...]
    branches: tuple[tuple[Instruction, int], ...]
    site: Site | None


def walk(module: Module, scans: Mapping[str, int] | None = None) -> Iterator[Visit]:
    """Yields every instruction at every place where it runs, in the order of the schedule.

    Reducers (`to_apply` of a reduction) are not entered: their cost is their caller's. The condition of a loop runs
    once more than its body.

    Args:
        scans: op_name -> length, from `jaxprs.scan_lengths`.
    """
    scans = scans or {}

    def visit(
        computation: Computation,
        runs: int | None,
        known: int,
        loops: tuple[Instruction, ...],
        branches: tuple[tuple[Instruction, int], ...],
        site: Site | None,
    ) -> Iterator[Visit]:
        for i in computation.instructions:
            yield Visit(i, runs, known, loops, branches, site)
            inner = Site(i, site)
            if i.opcode == "while":
                trips = trip_count(module, i, site, scans)
                for role, extra in (("body", 0), ("condition", 1)):
                    times = None if trips is None or runs is None else runs * (trips + extra)
                    certain = known * (1 if trips is None else trips + extra)
                    for name in i.called.get(role, ()):
                        yield from visit(module.computations[name], times, certain, (*loops, i), branches, inner)
            elif i.opcode == "conditional":
                for number, name in enumerate(i.called.get("branch_computations", ())):
                    yield from visit(module.computations[name], runs, known, loops, (*branches, (i, number)), inner)
            elif i.opcode in _CALLS:
                for name in i.called.get(_CALLS[i.opcode], ()):
                    if name in module.computations:
                        yield from visit(module.computations[name], runs, known, loops, branches, inner)

    yield from visit(module.entry, 1, 1, (), (), None)


# ---- trip counts -----------------------------------------------------------------------------------------------------


def trip_count(
    module: Module, loop: Instruction, site: Site | None = None, scans: Mapping[str, int] | None = None
) -> int | None:
    """Returns how often the body of a `while` runs, or None where that is not known before it runs."""
    written = loop.backend_config.get("known_trip_count", {}).get("n")
    if written is not None:
        return int(written)
    counted = _from_condition(module, loop, site)
    if counted is not None:
        return counted
    return (scans or {}).get(loop.op_name)


class _Affine(NamedTuple):
    """A scalar integer: `element` of the loop's carry (None: nothing) plus `offset`."""

    element: int | None
    offset: int


class _Place(NamedTuple):
    """Where an instruction is read: inside a called computation, parameters are the caller's operands."""

    computation: Computation
    loop: Instruction | None
    caller: Instruction | None
    outer: _Place | None


def _from_condition(module: Module, loop: Instruction, site: Site | None) -> int | None:
    condition = module.computations[loop.called["condition"][0]]
    inside = _Place(condition, loop, None, None)
    found = _comparison(module, condition.root, inside)
    if found is None:
        return None
    left, right, direction = found
    if right.element is not None and left.element is None:
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if left.element is None:
        return None
    bound = _entry_value(module, loop, site, right)
    start = _entry_value(module, loop, site, _Affine(left.element, 0), invariant=False)
    body = module.computations[loop.called["body"][0]]
    after = _element(module, body.root, left.element, _Place(body, loop, None, None), 0)
    if bound is None or start is None or after is None or after.element != left.element:
        return None
    return _count(start + left.offset, bound, after.offset, direction)


def _count(start: int, bound: int, stride: int, direction: str) -> int | None:
    if direction in ("GT", "GE"):
        start, bound, stride = -start, -bound, -stride
        direction = {"GT": "LT", "GE": "LE"}[direction]
    if direction == "NE":
        return (
            (bound - start) // stride
            if stride and (bound - start) % stride == 0 and (bound - start) // stride >= 0
            else None
        )
    if direction not in ("LT", "LE"):
        return None
    bound += direction == "LE"
    if start >= bound:
        return 0
    return -((start - bound) // stride) if stride > 0 else None


def _comparison(module: Module, i: Instruction, place: _Place) -> tuple[_Affine, _Affine, str] | None:
    """Returns (left, right, direction) where an instruction is one comparison of integers."""
    if i.opcode == "compare":
        left, right = (_operand(module, i, n, place, 0) for n in (0, 1))
        direction = i.attribute("direction")
        return None if left is None or right is None or direction is None else (left, right, direction)
    if i.opcode in _CALLS and (names := i.called.get(_CALLS[i.opcode])):
        inner = module.computations[names[0]]
        return _comparison(module, inner.root, _Place(inner, None, i, place))
    if i.opcode in _SAME and (source := place.computation.operand(i)):
        return _comparison(module, source, place)
    return None


def _operand(module: Module, i: Instruction, index: int, place: _Place, depth: int) -> _Affine | None:
    source = place.computation.operand(i, index)
    return None if source is None else _value(module, source, place, depth + 1)


def _value(module: Module, i: Instruction, place: _Place, depth: int) -> _Affine | None:
    """Returns a scalar integer as an element of the loop's carry plus a constant, or None."""
    if depth > _DEPTH:
        return None
    if i.opcode == "constant":
        text = i.text.strip()
        return _Affine(None, int(text)) if text.lstrip("-").isdigit() else None
    if i.opcode in _SAME:
        return _operand(module, i, 0, place, depth)
    if i.opcode in ("add", "subtract"):
        left, right = (_operand(module, i, n, place, depth) for n in (0, 1))
        if left is None or right is None or (left.element is not None and right.element is not None):
            return None
        if i.opcode == "subtract":
            return None if right.element is not None else _Affine(left.element, left.offset - right.offset)
        element = left.element if left.element is not None else right.element
        return _Affine(element, left.offset + right.offset)
    if i.opcode == "parameter":
        if place.caller is None or place.outer is None:
            return None
        return _operand(module, place.caller, int(i.text), place.outer, depth)
    if i.opcode == "get-tuple-element":
        source = place.computation.operand(i)
        return None if source is None else _element(module, source, int(i.attribute("index") or 0), place, depth + 1)
    if i.opcode in _CALLS and (names := i.called.get(_CALLS[i.opcode])):
        inner = module.computations[names[0]]
        return _value(module, inner.root, _Place(inner, None, i, place), depth + 1)
    return None


def _element(module: Module, i: Instruction, index: int, place: _Place, depth: int) -> _Affine | None:
    """Returns element `index` of an instruction with a tuple as its result."""
    if depth > _DEPTH:
        return None
    if i.opcode == "tuple":
        return _operand(module, i, index, place, depth)
    if i.opcode == "parameter":
        if place.loop is not None:
            return _Affine(index, 0)
        if place.caller is None or place.outer is None:
            return None
        source = place.outer.computation.operand(place.caller, int(i.text))
        return None if source is None else _element(module, source, index, place.outer, depth + 1)
    if i.opcode in _SAME:
        source = place.computation.operand(i)
        return None if source is None else _element(module, source, index, place, depth + 1)
    if i.opcode in _CALLS and (names := i.called.get(_CALLS[i.opcode])):
        inner = module.computations[names[0]]
        return _element(module, inner.root, index, _Place(inner, None, i, place), depth + 1)
    if i.opcode == "while" and _keeps(module, i, index):
        source = place.computation.operand(i)
        return None if source is None else _element(module, source, index, place, depth + 1)
    return None


def _keeps(module: Module, loop: Instruction, index: int) -> bool:
    """Returns whether a loop hands an element of its carry through unchanged."""
    body = module.computations[loop.called["body"][0]]
    return _element(module, body.root, index, _Place(body, loop, None, None), 0) == _Affine(index, 0)


def _entry_value(
    module: Module, loop: Instruction, site: Site | None, value: _Affine, invariant: bool = True
) -> int | None:
    """Returns the integer of a value when the loop begins; with `invariant` only if the loop keeps it."""
    if value.element is None:
        return value.offset
    if invariant and not _keeps(module, loop, value.element):
        return None
    around = module.computations[loop.computation]
    caller = None if site is None else site.caller
    if caller is not None and caller.opcode == "while":
        place = _Place(around, caller, None, None)
    else:
        place = _Place(around, None, None, None)
    source = around.operand(loop)
    first = None if source is None else _element(module, source, value.element, place, 0)
    if first is None:
        return None
    if first.element is None:
        return first.offset + value.offset
    if caller is None or caller.opcode != "while":
        return None
    outer = _entry_value(module, caller, site.outer if site else None, first)
    return None if outer is None else outer + value.offset
