"""`float32-on-the-wire`: data is sent as float32, and all receivers cast it to bfloat16: twice the bytes necessary.

Checked if `precision.compute` is bfloat16, for ops that only move data (gathers, exchanges, permutations). Sums are
not reported: `precision.reduction: float32` requests them.
"""

from __future__ import annotations

from collections.abc import Iterator

from spmdkit.foundation.formatting import format_bytes, shown_axes
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding
from spmdkit.plan.hlo.readers import all_readers
from spmdkit.plan.hlo.text import SAME, Instruction

_MOVES = ("all_gather", "all_to_all", "collective_permute")
_RENAMES = (*SAME, "get-tuple-element", "all-gather-done", "collective-permute-done", "slice", "dynamic-slice")


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields a finding for each transfer of float32 of which only the bfloat16 cast is read."""
    if step.program.config.precision.compute != "bfloat16" or step.is_substitute:
        return
    instructions = {i.name: i for i in step.module.instructions()}
    for c in step.bill.collectives:
        if (c.emulated_op or c.op) not in _MOVES or c.dtype != "f32" or not step.is_significant(c):
            continue
        if all_readers(step.module, instructions[c.names[0]], _is_cast, 12):
            yield Finding(
                "float32-on-the-wire",
                (
                    f"{c.op} over {shown_axes(c.axes)} moves {', '.join(map(str, c.shapes[:2]))} as float32, and all "
                    f"its readers cast it to bfloat16: {format_bytes(c.bytes_at_least)} sent a step, "
                    f"{format_bytes(c.bytes_at_least / 2)} would do"
                ),
                c.source,
                "Cast before it moves: x.astype(jnp.bfloat16) in front of sk.shard or of the collective.",
            )


def _is_cast(reader: Instruction) -> bool | None:
    """Returns whether a reader casts to bfloat16; None if it passes the array on."""
    if reader.opcode == "convert":
        return reader.shapes[0].dtype == "bf16"
    return None if reader.opcode in _RENAMES else False
