"""Who reads an array of the program: all of it, or one part on each device; and whether it is zeros around a shard."""

from __future__ import annotations

from collections.abc import Callable

from spmdkit.plan.hlo.text import Instruction, Module

SAME = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "transpose")
"""Operations that hand an array on, in another form."""


def only_parts_read(module: Module, i: Instruction, group_size: int) -> bool:
    """Returns whether every large array of a result is read only in parts, one in `group_size`, directly or inside
    fusions."""
    computation = module.computations[i.computation]
    large = max((shape.size for shape in i.shapes), default=0)
    if large < group_size:
        return False
    arrays = [i] if len(i.shapes) == 1 else [u for u in computation.users[i.name] if u.opcode == "get-tuple-element"]
    arrays = [a for a in arrays if a.shapes[0].size * 4 >= large]
    return bool(arrays) and all(all_readers(module, a, _takes_part(a.shapes[0].size, group_size), 8) for a in arrays)


def _takes_part(whole: int, group_size: int) -> Callable[[Instruction], bool | None]:
    def wanted(reader: Instruction) -> bool | None:
        if reader.opcode == "dynamic-slice":
            return reader.shapes[0].size * group_size <= whole
        return None if reader.opcode in (*SAME, "pad") else False

    return wanted


def all_readers(module: Module, i: Instruction, wanted: Callable[[Instruction], bool | None], steps: int) -> bool:
    """Returns whether all that reads an array, inside of fusions too, is `wanted`; None: it passes the array on, and
    its readers decide.

    A result that leaves its computation has no reader, and readers more than `steps` away are not searched: False.
    """
    users = module.computations[i.computation].users[i.name]
    if not users or not steps or i.is_root:
        return False
    for user in users:
        if user.opcode == "fusion":
            inner = module.computations[user.called["calls"][0]]
            numbers = [n for n, name in enumerate(user.operands) if name == i.name]
            handed_on = [p for p in inner.instructions if p.opcode == "parameter" and int(p.text) in numbers]
        elif (found := wanted(user)) is None:
            handed_on = [user]
        elif found:
            continue
        else:
            return False
        if not all(all_readers(module, other, wanted, steps - 1) for other in handed_on):
            return False
    return True


def is_padded_shard(module: Module, i: Instruction, group_size: int) -> bool:
    """Returns whether an array is zeros with one part in `group_size` put in."""
    computation = module.computations[i.computation]
    steps = 0
    while i.opcode in SAME and steps < 16 and (source := computation.operand(i)):
        i, steps = source, steps + 1
    root, base_of = i, computation
    if i.opcode == "fusion":
        base_of = module.computations[i.called["calls"][0]]
        root = base_of.root
    if root.opcode != "dynamic-update-slice":
        return False
    base, update = base_of.operand(root, 0), base_of.operand(root, 1)
    if base is not None and base.opcode == "parameter" and i.opcode == "fusion":
        base = computation.operand(i, int(base.text))
    zero = base is not None and base.opcode in ("broadcast", "constant")
    return zero and update is not None and update.shapes[0].size * group_size == root.shapes[0].size
