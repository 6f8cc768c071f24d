"""Extracts the collectives of a compiled program in all their forms.

Plain (`all-reduce`), split (`all-gather-start` and `-done`: counted at the start), wrapped (`async-start` that calls a
computation with the collective in it; `call-start` on the sparse cores of a TPU 7x), inside fusions (the TPU compiler
emits a reduce-scatter as a fusion of an all-reduce with a sliced result). Everything is read from opcodes, operands and
groups, never from names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spmdkit.plan.hlo.groups import Groups, axes_of, replica_groups, source_target_pairs
from spmdkit.plan.hlo.loops import Visit
from spmdkit.plan.hlo.readers import is_padded_shard, only_parts_read
from spmdkit.plan.hlo.source import op_name_of, source_of
from spmdkit.plan.hlo.text import Instruction, Module, Shape
from spmdkit.plan.hlo.tpu_forms import between_slices, is_continued, is_spread

OPCODES = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "broadcast",
}
OPS = tuple(OPCODES.values())


@dataclass(frozen=True, kw_only=True)
class HloCollective:
    """A collective in the text.

    Attributes:
        names: the HLO instruction; for a merged row of a bill, the instructions of all its operations.
        op: one of `OPS`.
        size: bytes of the arrays in the table of `collectives_bill`, for one execution.
        dtype: of the largest array, in XLA's notation (`f32`, `bf16`).
        shapes: the input arrays of each device.
        groups: logical device numbers (positions in the flattened mesh); for collective_permute the (source, target)
            pairs.
        spans: mesh axes along which the devices of a group differ, in mesh order -> number of positions in one group;
            less than the size of the axis if only a part of it participates.
        group_size: devices of one group (the largest).
        is_async: whether start and completion are separate, so that other work can overlap.
        source: `file.py:12` of the user's line, or else of the spmdkit line; None if XLA created it.
        op_name: JAX's op name, a path.
        emulated_op: the cheaper op that this all_reduce emulates (`all_gather`, `reduce_scatter`), or None.
    """

    names: tuple[str, ...]
    op: str
    size: int
    dtype: str
    shapes: tuple[Shape, ...]
    groups: Groups = field(repr=False)
    spans: Mapping[str, int]
    group_size: int
    is_async: bool
    source: str | None
    op_name: str
    emulated_op: str | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes along which the devices of a group differ."""
        return tuple(self.spans)


def hlo_collectives(
    module: Module, sizes: Mapping[str, int], visits: Iterable[Visit]
) -> Iterator[tuple[Visit, HloCollective]]:
    """Yields every collective at every site where it runs, including those over groups of one device."""
    read: dict[tuple[int, int], HloCollective] = {}
    for visit in visits:
        i = visit.instruction
        base = i.opcode.removesuffix("-start")
        sliced = between_slices(i, math.prod(sizes.values()))
        if (base not in OPCODES and sliced is None) or is_continued(module, i):
            continue
        caller = visit.site.caller if visit.site is not None else None
        key = (id(i), id(caller))
        if key not in read:
            fields = (
                _read(module, i, OPCODES[base], caller) if sliced is None else _read_between_slices(module, i, *sliced)
            )
            read[key] = HloCollective(names=(i.name,), spans=axes_of(fields["groups"], sizes), **fields)
        yield visit, read[key]


def _read(module: Module, i: Instruction, op: str, caller: Instruction | None) -> dict[str, Any]:
    inputs = module.operands(i)
    if op == "ragged_all_to_all":
        inputs = inputs[:1]  # the remaining operands are the output buffer, offsets and sizes
    shapes = tuple(shape for operand in inputs for shape in operand.shapes)
    size = sum(shape.bytes for shape in shapes)
    if op == "collective_permute":
        groups = source_target_pairs(i)
        moves = any(source != target for source, target in groups)
        group_size, size = (2, size) if moves else (1, 0)
    else:
        groups = replica_groups(i, module.num_partitions)
        group_size = max((len(group) for group in groups), default=1)
    if op == "all_gather":
        size *= group_size
    elif op == "all_reduce" and not i.opcode.endswith("-start"):
        size = (size + i.bytes) // 2  # a cast on TPU: sums have the input dtype, the result the output dtype
    of_caller = "" if caller is None else caller.opcode
    if op == "all_reduce" and caller is not None and of_caller == "fusion" and _sliced(module, i, caller, group_size):
        op = "reduce_scatter"
    largest = max(shapes, key=lambda shape: shape.bytes, default=None)
    named = caller if caller is not None and not i.op_name and not module.frames(i) and of_caller != "while" else i
    return {
        "op": op,
        "size": size,
        "dtype": largest.dtype if largest else "token",
        "shapes": shapes,
        "groups": groups,
        "group_size": group_size,
        "is_async": is_spread(i) or i.opcode.endswith("-start") or of_caller in ("async-start", "call-start"),
        "source": source_of(module, named),
        "op_name": op_name_of(module, named),
        "emulated_op": _emulated_op(module, i, inputs, group_size) if op == "all_reduce" else None,
    }


def _read_between_slices(module: Module, i: Instruction, op: str, groups: Groups) -> dict[str, Any]:
    """Returns a collective between slices; the data sent is its first operand."""
    shapes = next((operand.shapes for operand in module.operands(i)), i.shapes[:1])
    size, group_size = sum(shape.bytes for shape in shapes), len(groups[0]) if groups else 1
    return {
        "op": op,
        "size": size * group_size if op == "all_gather" else size,
        "dtype": shapes[0].dtype if shapes else "token",
        "shapes": shapes,
        "groups": groups,
        "group_size": group_size,
        "is_async": True,
        "source": source_of(module, i),
        "op_name": op_name_of(module, i),
    }


def _sliced(module: Module, i: Instruction, caller: Instruction, group_size: int) -> bool:
    """Returns whether a fusion retains one part in `group_size` of the result of its all-reduce."""
    full_bytes, part_bytes = i.bytes, sum(shape.bytes for shape in caller.shapes)
    users = module.around(i).users[i.name]
    slices = {"dynamic-slice", "bitcast", "reshape", "copy", "tuple", "get-tuple-element"}
    return bool(users) and part_bytes * group_size == full_bytes and all(user.opcode in slices for user in users)


def _emulated_op(module: Module, i: Instruction, put_in: list[Instruction], group_size: int) -> str | None:
    """Returns the cheaper op that an all-reduce emulates, or None.

    `all_gather`: each device inserts its shard into zeros. `reduce_scatter`: each device reads one part in `group_size`
    of the sum. The TPU compiler does this if it cannot emit the cheaper op (jax 0.10.2, v5p, a group over the full
    torus).
    """
    if group_size < 2:
        return None
    large = [operand for operand in put_in if operand.bytes * 4 >= sum(o.bytes for o in put_in)]
    if large and all(is_padded_shard(module, operand, group_size) for operand in large):
        return "all_gather"
    return "reduce_scatter" if only_parts_read(module, i, group_size) else None
