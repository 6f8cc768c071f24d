"""`gather-of-unsharded`: something is cut over the devices and gathered whole, and nobody ever uses the parts.

Two forms: an argument of the step that is no parameter (the batch, model state) is gathered before anything is computed with
it; an array that every device holds is cut by the device's number, and gathered again.
"""

from __future__ import annotations

from collections.abc import Iterator

from spmdkit.errors import format_bytes
from spmdkit.plan import loops
from spmdkit.plan.bill import Collective
from spmdkit.plan.cause import origin_of
from spmdkit.plan.finding import Finding
from spmdkit.plan.findings import Subject
from spmdkit.plan.hlo import Instruction, Module
from spmdkit.plan.parts import SAME


def find(subject: Subject) -> Iterator[Finding]:
    """Yields a finding for each gather of what was never used in parts."""
    wanted: dict[str, Collective] = {
        c.names[0]: c for c in subject.bill.collectives if (c.stands_for or c.op) == "all_gather" and subject.matters(c)
    }
    if not wanted:
        return
    for visit in loops.walk(subject.module):
        c = wanted.pop(visit.instruction.name, None)
        if c is None:
            continue
        argument = origin_of(subject.module, visit)
        if argument and "params" not in argument and "opt_state" not in argument:
            yield Finding(
                "warning",
                "gather-of-unsharded",
                f"{argument.replace(chr(92), '')} is cut over {' x '.join(c.axes)} and gathered whole on every device before it is used "
                f"({format_bytes(c.size)}, {format_bytes(c.bytes_at_least)} sent a step)",
                c.source,
                "Use each device's own rows, or keep it out of the batch (Task arguments, model state) if every device needs all of it.",
            )
        elif _cut_from_whole(subject.module, visit.instruction, c.group_size):
            yield Finding(
                "warning",
                "gather-of-unsharded",
                f"{c.shapes[0]} is cut from an array that every device holds, and gathered again over {' x '.join(c.axes)} "
                f"({format_bytes(c.bytes_at_least)} sent a step)",
                c.source,
                "Leave out the constraint that cuts it (sk.shard), or use the parts where they are.",
            )


def _cut_from_whole(module: Module, gather: Instruction, group_size: int) -> bool:
    """Returns whether a gather's operand is one part in `group_size`, cut at the device's own number."""
    computation = module.computations[gather.computation]
    i = computation.operand(gather)
    steps = 0
    while i is not None and i.opcode in SAME and steps < 16:
        i, steps = computation.operand(i), steps + 1
    if i is None:
        return False
    cut, place = i, computation
    if i.opcode == "fusion":
        place = module.computations[i.called["calls"][0]]
        cut = place.root
        while cut.opcode in SAME and (below := place.operand(cut)):
            cut = below
    if cut.opcode != "dynamic-slice" or not cut.operands:
        return False
    whole = place.operand(cut)
    by_device = any(
        j.opcode == "partition-id" for c in {computation.name, place.name} for j in module.computations[c].instructions
    )
    return by_device and whole is not None and whole.shapes[0].size == cut.shapes[0].size * group_size
