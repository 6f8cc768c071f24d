"""Finds the collectives of a compiled program in all their forms.

Plain (`all-reduce`), split (`all-gather-start` and `-done`: counted at the start), wrapped (`async-start` that calls a
computation with the collective in it; `call-start` on the sparse cores of a TPU 7x), inside fusions (the TPU compiler
makes a reduce-scatter of an all-reduce with a sliced result in one fusion). Everything is read from opcodes, operands
and groups, nothing from names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class HloCollective:
    """A collective in the text; fields as in `bill.Collective`."""

    instruction: Instruction
    op: str
    size: int
    dtype: str
    shapes: tuple[Shape, ...]
    groups: Groups
    spans: dict[str, int]
    group_size: int
    is_async: bool
    source: str | None
    op_name: str
    algorithm: str | None
    emulated_op: str | None


def hlo_collectives(
    module: Module, sizes: Mapping[str, int], visits: Iterable[Visit]
) -> Iterator[tuple[Visit, HloCollective]]:
    """Yields every collective at every place where it runs, also those over groups of one device."""
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
            read[key] = (
                _read(module, i, OPCODES[base], caller, sizes)
                if sliced is None
                else _read_between_slices(module, i, *sliced, sizes)
            )
        yield visit, read[key]


def _read(
    module: Module, i: Instruction, op: str, caller: Instruction | None, sizes: Mapping[str, int]
) -> HloCollective:
    computation = module.computations[i.computation]
    put_in = [computation.by_name[name] for name in i.operands if name in computation.by_name]
    if op == "ragged_all_to_all":
        put_in = put_in[:1]  # the others are the output buffer, offsets and sizes
    shapes = tuple(shape for operand in put_in for shape in operand.shapes)
    size = sum(shape.bytes for shape in shapes)
    num_devices = module.num_partitions
    if op == "collective_permute":
        groups = source_target_pairs(i)
        moving = [pair for pair in groups if pair[0] != pair[1]]
        group_size = 2 if moving else 1
        size = size if moving else 0
    else:
        groups = replica_groups(i, num_devices)
        group_size = max((len(group) for group in groups), default=1)
    if op == "all_gather":
        size *= group_size
    elif op == "all_reduce" and not i.opcode.endswith("-start"):
        size = (size + i.bytes) // 2  # a TPU's may cast: the sums travel as they went in, the result as it comes out
    if (
        op == "all_reduce"
        and caller is not None
        and caller.opcode == "fusion"
        and _sliced(module, i, caller, group_size)
    ):
        op = "reduce_scatter"
    emulated_op = _stands_for(module, i, put_in, group_size) if op == "all_reduce" else None
    largest = max(shapes, key=lambda shape: shape.bytes, default=None)
    named = caller if caller is not None and not i.op_name and not module.frames(i) and caller.opcode != "while" else i
    config = i.backend_config.get("collective_algorithm_config") or {}
    if not config and caller is not None and caller.opcode == "fusion":
        config = caller.backend_config.get("collective_algorithm_config") or {}
    return HloCollective(
        instruction=i,
        op=op,
        size=size,
        dtype=largest.dtype if largest else "token",
        shapes=shapes,
        groups=groups,
        spans=axes_of(groups, sizes),
        group_size=group_size,
        is_async=is_spread(i)
        or i.opcode.endswith("-start")
        or (caller is not None and caller.opcode in ("async-start", "call-start")),
        source=source_of(module, named),
        op_name=op_name_of(module, named),
        algorithm=config.get("emitter"),
        emulated_op=emulated_op,
    )


def _read_between_slices(
    module: Module, i: Instruction, op: str, groups: Groups, sizes: Mapping[str, int]
) -> HloCollective:
    """Returns a collective between slices; what is sent is its first operand."""
    put_in = module.computations[i.computation].operand(i)
    shapes = put_in.shapes if put_in is not None else i.shapes[:1]
    size = sum(shape.bytes for shape in shapes)
    group_size = len(groups[0]) if groups else 1
    return HloCollective(
        instruction=i,
        op=op,
        size=size * group_size if op == "all_gather" else size,
        dtype=shapes[0].dtype if shapes else "token",
        shapes=shapes,
        groups=groups,
        spans=axes_of(groups, sizes),
        group_size=group_size,
        is_async=True,
        source=source_of(module, i),
        op_name=op_name_of(module, i),
        algorithm="megascale",
        emulated_op=None,
    )


def _sliced(module: Module, i: Instruction, caller: Instruction, group_size: int) -> bool:
    """Returns whether a fusion keeps one part in `group_size` of what its all-reduce gives."""
    whole, kept = i.bytes, sum(shape.bytes for shape in caller.shapes)
    users = module.computations[i.computation].users.get(i.name, [])
    slices = {"dynamic-slice", "bitcast", "reshape", "copy", "tuple", "get-tuple-element"}
    return bool(users) and kept * group_size == whole and all(user.opcode in slices for user in users)


# ---- what an all-reduce is for
# ----------------------------------------------------------------------------------------


def _stands_for(module: Module, i: Instruction, put_in: list[Instruction], group_size: int) -> str | None:
    """Returns the cheaper op that an all-reduce does the work of, or None.

    `all_gather`: each device puts its shard into zeros. `reduce_scatter`: each device reads one part in `group_size` of
        the
    sum. The TPU compiler does this where it finds no way for the cheaper one (jax 0.10.2, v5p, a group over the whole
    torus).
    """
    if group_size < 2:
        return None
    large = [operand for operand in put_in if operand.bytes * 4 >= sum(o.bytes for o in put_in)]
    if large and all(is_padded_shard(module, operand, group_size) for operand in large):
        return "all_gather"
    return "reduce_scatter" if only_parts_read(module, i, group_size) else None
