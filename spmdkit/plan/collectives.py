"""Finding the collectives of a compiled program in all their guises.

Plain (`all-reduce`), split (`all-gather-start` and `-done`: counted at the start), wrapped (`async-start` that calls a
computation with the collective in it), inside fusions (the TPU compiler makes a reduce-scatter of an all-reduce whose
result is sliced in one fusion). Everything is read from opcodes, operands and groups, nothing from names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from spmdkit.plan.groups import Groups, axes_of, replica_groups, source_target_pairs
from spmdkit.plan.hlo import Instruction, Module, Shape
from spmdkit.plan.loops import Visit
from spmdkit.plan.source import op_name_of, source_of

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
class Found:
    """A collective as it stands in the text; fields as in `bill.Collective`."""

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
    stands_for: str | None


def found_collectives(
    module: Module, sizes: Mapping[str, int], visits: Iterable[Visit]
) -> Iterator[tuple[Visit, Found]]:
    """Yields every collective at every place where it runs, also those over groups of one device."""
    read: dict[tuple[int, int], Found] = {}
    for visit in visits:
        i = visit.instruction
        base = i.opcode.removesuffix("-start")
        if base not in OPCODES:
            continue
        caller = visit.site.caller if visit.site is not None else None
        key = (id(i), id(caller))
        if key not in read:
            read[key] = _read(module, i, OPCODES[base], caller, sizes)
        yield visit, read[key]


def _read(module: Module, i: Instruction, op: str, caller: Instruction | None, sizes: Mapping[str, int]) -> Found:
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
    stands_for = _stands_for(module, i, put_in, group_size) if op == "all_reduce" else None
    largest = max(shapes, key=lambda shape: shape.bytes, default=None)
    named = caller if caller is not None and not i.op_name and not module.frames(i) and caller.opcode != "while" else i
    config = i.backend_config.get("collective_algorithm_config") or {}
    if not config and caller is not None and caller.opcode == "fusion":
        config = caller.backend_config.get("collective_algorithm_config") or {}
    return Found(
        instruction=i,
        op=op,
        size=size,
        dtype=largest.dtype if largest else "token",
        shapes=shapes,
        groups=groups,
        spans=axes_of(groups, sizes),
        group_size=group_size,
        is_async=i.opcode.endswith("-start") or (caller is not None and caller.opcode == "async-start"),
        source=source_of(module, named),
        op_name=op_name_of(module, named),
        algorithm=config.get("emitter"),
        stands_for=stands_for,
    )


def _sliced(module: Module, i: Instruction, caller: Instruction, group_size: int) -> bool:
    """Returns whether a fusion keeps one part in `group_size` of what its all-reduce gives."""
    whole, kept = i.bytes, sum(shape.bytes for shape in caller.shapes)
    users = module.computations[i.computation].users.get(i.name, [])
    slices = {"dynamic-slice", "bitcast", "reshape", "copy", "tuple", "get-tuple-element"}
    return bool(users) and kept * group_size == whole and all(user.opcode in slices for user in users)


# ---- what an all-reduce is for ----------------------------------------------------------------------------------------

_SAME = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "transpose")


def _stands_for(module: Module, i: Instruction, put_in: list[Instruction], group_size: int) -> str | None:
    """Returns the cheaper op that an all-reduce does the work of, or None.

    `all_gather`: each device puts its shard into zeros. `reduce_scatter`: each device reads one part in `group_size` of the
    sum. The TPU compiler does this where it finds no way for the cheaper one (jax 0.10.2, v5p, a group over the whole torus).
    """
    large = [operand for operand in put_in if operand.bytes * 4 >= sum(o.bytes for o in put_in)]
    if large and all(_is_padded_shard(module, operand, group_size) for operand in large):
        return "all_gather"
    return "reduce_scatter" if group_size > 1 and _only_parts_read(module, i, group_size) else None


def _is_padded_shard(module: Module, i: Instruction, group_size: int) -> bool:
    computation = module.computations[i.computation]
    steps = 0
    while i.opcode in _SAME and steps < 16 and (source := computation.operand(i)):
        i, steps = source, steps + 1
    if i.opcode == "fusion":
        inner = module.computations[i.called["calls"][0]]
        root = inner.root
        if root.opcode != "dynamic-update-slice":
            return False
        base, update = inner.operand(root, 0), inner.operand(root, 1)
        if base is not None and base.opcode == "parameter":
            base = computation.operand(i, int(base.text))
        return _is_zero(base) and update is not None and update.shapes[0].size * group_size == root.shapes[0].size
    if i.opcode != "dynamic-update-slice":
        return False
    base, update = computation.operand(i, 0), computation.operand(i, 1)
    return _is_zero(base) and update is not None and update.shapes[0].size * group_size == i.shapes[0].size


def _is_zero(i: Instruction | None) -> bool:
    return i is not None and i.opcode in ("broadcast", "constant")


def _only_parts_read(module: Module, i: Instruction, group_size: int) -> bool:
    """Returns whether every large array of a result is read only in parts, directly or inside fusions."""
    computation = module.computations[i.computation]
    large = max((shape.size for shape in i.shapes), default=0)
    if large < group_size:
        return False
    arrays = [i] if len(i.shapes) == 1 else [u for u in computation.users[i.name] if u.opcode == "get-tuple-element"]
    arrays = [a for a in arrays if a.shapes[0].size * 4 >= large]
    return bool(arrays) and all(_parts_only(module, a, a.shapes[0].size, group_size, 8) for a in arrays)


def _parts_only(module: Module, i: Instruction, whole: int, group_size: int, steps: int) -> bool:
    computation = module.computations[i.computation]
    users = computation.users[i.name]
    if not users or not steps or i.is_root:
        return False
    for user in users:
        if user.opcode == "dynamic-slice":
            if user.shapes[0].size * group_size != whole:
                return False
        elif user.opcode == "fusion":
            inner = module.computations[user.called["calls"][0]]
            numbers = [n for n, name in enumerate(user.operands) if name == i.name]
            parameters = [p for p in inner.instructions if p.opcode == "parameter" and int(p.text) in numbers]
            if not all(_parts_only(module, p, whole, group_size, steps - 1) for p in parameters):
                return False
        elif user.opcode not in _SAME or not _parts_only(module, user, whole, group_size, steps - 1):
            return False
    return True
