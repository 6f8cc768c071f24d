"""The readers of an array: the full array, or one part on each device; and whether it is a shard padded with zeros."""

from __future__ import annotations

from collections.abc import Callable

from spmdkit.plan.hlo.text import SAME, Instruction, Module


def only_parts_read(module: Module, i: Instruction, group_size: int) -> bool:
    """Returns whether every large array of a result is read only in parts, one in `group_size`, directly or inside
    fusions."""
    large = max((shape.size for shape in i.shapes), default=0)
    if large < group_size:
        return False
    users = module.around(i).users[i.name]
    arrays = [i] if len(i.shapes) == 1 else [u for u in users if u.opcode == "get-tuple-element"]
    arrays = [a for a in arrays if a.shapes[0].size * 4 >= large]
    return bool(arrays) and all(all_readers(module, a, _reads_part(a.shapes[0].size, group_size), 8) for a in arrays)


def _reads_part(whole: int, group_size: int) -> Callable[[Instruction], bool | None]:
    def wanted(reader: Instruction) -> bool | None:
        if reader.opcode == "dynamic-slice":
            return reader.shapes[0].size * group_size <= whole
        return None if reader.opcode in (*SAME, "pad") else False

    return wanted


def all_readers(module: Module, i: Instruction, wanted: Callable[[Instruction], bool | None], steps: int) -> bool:
    """Returns whether all readers of an array, including those inside fusions, are `wanted`. A reader for which
    `wanted` returns None passes the array on, and its readers are checked.

    A result that its computation returns has no reader, and readers more than `steps` away are not searched: False.
    """
    users = module.around(i).users[i.name]
    if not users or not steps or i.is_root:
        return False
    for user in users:
        if user.opcode == "fusion":
            numbers = [n for n, name in enumerate(user.operands) if name == i.name]
            parameters = (p for p in module.fused(user).instructions if p.opcode == "parameter")
            forwarded = [p for p in parameters if int(p.text) in numbers]
        elif (accepted := wanted(user)) is None:
            forwarded = [user]
        elif accepted:
            continue
        else:
            return False
        if not all(all_readers(module, other, wanted, steps - 1) for other in forwarded):
            return False
    return True


def is_padded_shard(module: Module, i: Instruction, group_size: int) -> bool:
    """Returns whether an array is zeros with one part in `group_size` inserted."""
    computation = module.around(i)
    i = computation.producer(i, SAME)
    base_of = module.fused(i) if i.opcode == "fusion" else computation
    root = base_of.root if i.opcode == "fusion" else i
    if root.opcode != "dynamic-update-slice":
        return False
    base, update = base_of.operand(root, 0), base_of.operand(root, 1)
    if base is not None and base.opcode == "parameter" and i.opcode == "fusion":
        base = computation.operand(i, int(base.text))
    zero = base is not None and base.opcode in ("broadcast", "constant")
    return zero and update is not None and update.shapes[0].size * group_size == root.shapes[0].size
