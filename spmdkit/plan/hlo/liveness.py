"""The buffers that are live at the memory peak of a device, from the schedule in the program's text.

A buffer lives from the instruction that produces it to the last one that reads it, through all operations that only
rename it (tuples, their elements, bitcasts, the carry of a loop, an update in place). Temporaries of called
computations and loop bodies are added while these run. Outputs of the step are excluded. The total is that of
`compiled.memory_analysis()`; this analysis attributes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from spmdkit.plan.hlo.source import op_name_of, source_of
from spmdkit.plan.hlo.text import Computation, Instruction, Module

_RENAMES = {
    "tuple", "get-tuple-element", "bitcast", "while", "opt-barrier", "optimization-barrier", "copy-done", "all-gather-done",  # noqa: E501
    "all-reduce-done", "collective-permute-done", "async-done", "call-done", "async-update", "after-all", "dynamic-update-slice", "domain",  # noqa: E501
}  # fmt: skip
_ENTERED = {"while": ("body", "condition"), "call": ("to_apply",), "conditional": ("branch_computations",)}
_FREE = {"parameter", "constant", "iota", "partition-id", "replica-id", "token"}
_NOT_IN_PLACE = {
    "dot", "convolution", "reduce", "transpose", "gather", "scatter", "sort", "custom-call", "while", "conditional",
}  # fmt: skip


@dataclass(frozen=True)
class Buffer:
    """An array that is live at the peak.

    Attributes:
        name: of the HLO instruction that produces it.
        shape: `f32[8,128]`, on one device; the largest array of a tuple.
        bytes: including the backend's padding.
        source: `file.py:12`, or None.
        op_name: JAX's op name, a path.
    """

    name: str
    shape: str
    bytes: int
    source: str | None
    op_name: str


def live_at_peak(module: Module, limit: int = 12) -> tuple[Buffer, ...]:
    """Returns the largest temporaries that are live at the peak of the step, largest first."""
    _, alive = _peak(module, module.entry, {})
    return tuple(
        Buffer(
            i.name,
            str(max(i.shapes, key=lambda s: s.padded_bytes)),
            own_bytes(i),
            source_of(module, i),
            op_name_of(module, i),
        )
        for i in sorted(alive, key=own_bytes, reverse=True)[:limit]
    )


def own_bytes(i: Instruction) -> int:
    """Returns the bytes that an instruction's result takes in the device's main memory."""
    shapes = i.shapes
    if i.opcode.endswith("-start"):  # (operand, result, context): the operand belongs to another instruction
        shapes = shapes[len(shapes) // 2 :] if i.opcode == "all-gather-start" else shapes[1:2]
    return sum(shape.padded_bytes for shape in shapes if shape.space == 0)


def _peak(
    module: Module, computation: Computation, known: dict[str, tuple[int, list[Instruction]]]
) -> tuple[int, list[Instruction]]:
    """Returns (bytes, instructions) that are live at the peak inside a computation, without its parameters."""
    if computation.name in known:
        return known[computation.name]
    last, end = _last_uses(module, computation), len(computation.instructions)
    dying: dict[int, list[Instruction]] = defaultdict(list)
    now, best, alive, at_best = 0, 0, dict[str, Instruction](), list[Instruction]()
    for i in computation.instructions:
        if _allocates(module, i) and not (computation.is_entry and last[i.name] == end):
            dying[last[i.name]].append(i)
            alive[i.name] = i
            now += own_bytes(i)
        entered = (name for role in _ENTERED.get(i.opcode, ()) for name in i.called.get(role, ()))
        peaks = (_peak(module, module.computations[name], known) for name in entered)
        inner_bytes, inner = max(peaks, key=lambda peak: peak[0], default=(0, []))
        needed = now + inner_bytes - _reused(i, dying[i.index])
        if needed > best:
            best, at_best = needed, [*alive.values(), *inner]
        for j in dying[i.index]:
            del alive[j.name]
            now -= own_bytes(j)
    known[computation.name] = best, at_best
    return known[computation.name]


def _reused(i: Instruction, dying: Iterable[Instruction]) -> int:
    """Returns the bytes of a dead operand that the result overwrites, element by element."""
    if i.opcode in _NOT_IN_PLACE or (i.opcode == "fusion" and i.attribute("kind") not in ("kLoop", None)):
        return 0
    num_bytes = own_bytes(i)
    return num_bytes if any(j.name in i.operands and own_bytes(j) == num_bytes for j in dying) else 0


def _allocates(module: Module, i: Instruction) -> bool:
    """Returns whether an instruction allocates its result and does not only rename or update its operand."""
    return i.opcode not in _FREE and i.opcode not in _RENAMES and not _updates_in_place(module, i)


def _updates_in_place(module: Module, i: Instruction) -> bool:
    if i.opcode != "fusion":
        return False
    fused = module.fused(i)
    return fused.producer(fused.root, ("bitcast", "copy", "convert")).opcode == "dynamic-update-slice"


def _last_uses(module: Module, computation: Computation) -> dict[str, int]:
    """Returns name -> position of the last instruction that needs the buffer, through renames. Buffers of the root live
    to the end."""
    last = {i.name: i.index for i in computation.instructions}
    last[computation.root.name] = len(computation.instructions)
    for i in reversed(computation.instructions):
        renames = not _allocates(module, i) and i.opcode not in _FREE
        for operand in i.operands:
            if operand in last:
                last[operand] = max(last[operand], last[i.name] if renames else i.index)
    return last
