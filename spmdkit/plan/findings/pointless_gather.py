"""`gather-of-unsharded`: an array is sharded and gathered again, and its shards are never used.

Two forms: an argument of the step that is not a parameter (the batch, model state) is gathered before any computation
with it; an array that every device holds is sliced at the device's index and gathered again.
"""

from __future__ import annotations

from collections.abc import Iterator

from spmdkit.foundation.formatting import format_bytes, shown_axes
from spmdkit.plan.attribution import origin_of
from spmdkit.plan.collectives_bill import Collective
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding
from spmdkit.plan.hlo import loops
from spmdkit.plan.hlo.text import SAME, Computation, Instruction, Module


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields a finding for each gather of shards that are never used as shards."""
    wanted: dict[str, Collective] = {
        c.names[0]: c
        for c in step.bill.collectives
        if (c.emulated_op or c.op) == "all_gather" and step.is_significant(c)
    }
    if not wanted:
        return
    for visit in loops.walk(step.module, step.scans):
        c = wanted.pop(visit.instruction.name, None)
        if c is None:
            continue
        argument = origin_of(step.module, visit)
        if argument and "params" not in argument and "opt_state" not in argument:
            if _are_parts_used(step.module, visit.instruction):
                continue
            yield Finding(
                "gather-of-unsharded",
                (
                    f"{argument.replace(chr(92), '')} is sharded over {shown_axes(c.axes)} and gathered on every "
                    f"device before it is used ({format_bytes(c.size)}, {format_bytes(c.bytes_at_least)} sent a step)"
                ),
                c.source,
                (
                    "Use each device's own rows, or keep it out of the batch (Task arguments, model state) if every "
                    "device needs all of it."
                ),
            )
        elif _is_sliced_from_full(step.module, visit.instruction, c.group_size):
            yield Finding(
                "gather-of-unsharded",
                (
                    f"{c.shapes[0]} is a shard of an array that every device holds, and is gathered again over "
                    f"{shown_axes(c.axes)} ({format_bytes(c.bytes_at_least)} sent a step)"
                ),
                c.source,
                "Remove the constraint that shards it (sk.shard), or use the shards as they are.",
            )


def _are_parts_used(module: Module, gather: Instruction) -> bool:
    """Returns whether an instruction other than a gather reads the shard that a gather sends, or a cast of it."""
    computation, reader = module.around(gather), gather
    while (part := computation.operand(reader)) is not None:
        others = [user for user in computation.users[part.name] if user is not reader]
        if any(user.opcode.removesuffix("-start") != "all-gather" for user in others):
            return True
        if part.opcode not in SAME and not (part.opcode == "fusion" and len(part.operands) == 1):
            return False
        reader = part
    return False


def _is_sliced_from_full(module: Module, gather: Instruction, group_size: int) -> bool:
    """Returns whether a gather's operand is one part in `group_size` of a full array, sliced at the device's index."""
    computation = module.around(gather)
    operands = computation.operands(gather)
    if not operands:
        return False
    part = computation.producer(operands[0], SAME)
    place = module.fused(part) if part.opcode == "fusion" else computation
    cut = place.producer(place.root, SAME) if part.opcode == "fusion" else part
    if cut.opcode != "dynamic-slice" or not (operands := place.operands(cut)):
        return False
    if operands[0].shapes[0].size != cut.shapes[0].size * group_size:
        return False  # mainly one layer's weights, sliced from a stack at the layer's index
    makers = _before(place, operands[1:])
    if place is not computation:
        inputs = [computation.operand(part, int(maker.text)) for maker in makers if maker.opcode == "parameter"]
        makers += _before(computation, [operand for operand in inputs if operand is not None])
    inside = (j for maker in makers for name in maker.calls for j in module.computations[name].instructions)
    return any(maker.opcode == "partition-id" for maker in (*makers, *inside))


def _before(computation: Computation, ends: list[Instruction]) -> list[Instruction]:
    """Returns `ends` and the instructions of a computation that they are computed from."""
    visited, waiting = {i.name: i for i in ends}, list(ends)
    while waiting:
        new = {i.name: i for i in computation.operands(waiting.pop()) if i.name not in visited}
        visited |= new
        waiting += new.values()
    return list(visited.values())
