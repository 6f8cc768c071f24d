"""`gather-of-unsharded`: an array is sharded and gathered again, and its shards are never used.

Two forms: an argument of the step that is no parameter (the batch, model state) is gathered before anything is computed
with it; an array that every device holds is cut by the device's number, and gathered again.
"""

from __future__ import annotations

from collections.abc import Iterator

from spmdkit.foundation.formatting import format_bytes
from spmdkit.plan.attribution import origin_of
from spmdkit.plan.collectives_bill import Collective
from spmdkit.plan.finding import Finding
from spmdkit.plan.findings import CompiledStep
from spmdkit.plan.hlo import loops
from spmdkit.plan.hlo.readers import SAME
from spmdkit.plan.hlo.text import Computation, Instruction, Module


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields a finding for each gather of what was never used in parts."""
    wanted: dict[str, Collective] = {
        c.names[0]: c for c in step.bill.collectives if (c.emulated_op or c.op) == "all_gather" and step.matters(c)
    }
    if not wanted:
        return
    for visit in loops.walk(step.module, step.scans):
        c = wanted.pop(visit.instruction.name, None)
        if c is None:
            continue
        argument = origin_of(step.module, visit)
        if argument and "params" not in argument and "opt_state" not in argument:
            yield Finding(
                "warning",
                "gather-of-unsharded",
                (
                    f"{argument.replace(chr(92), '')} is cut over {' x '.join(c.axes)} and gathered whole on every "
                    f"device before it is used ({format_bytes(c.size)}, {format_bytes(c.bytes_at_least)} sent a step)"
                ),
                c.source,
                (
                    "Use each device's own rows, or keep it out of the batch (Task arguments, model state) if every "
                    "device needs all of it."
                ),
            )
        elif _cut_from_whole(step.module, visit.instruction, c.group_size):
            yield Finding(
                "warning",
                "gather-of-unsharded",
                (
                    f"{c.shapes[0]} is cut from an array that every device holds, and gathered again over "
                    f"{' x '.join(c.axes)} ({format_bytes(c.bytes_at_least)} sent a step)"
                ),
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
    if whole is None or whole.shapes[0].size != cut.shapes[0].size * group_size:
        return False  # above all: one layer's weights out of a stack, cut at the number of the layer
    starts = [place.by_name[name] for name in cut.operands[1:] if name in place.by_name]
    if place is not computation:
        fused = [s.text for s in _before(place, starts) if s.opcode == "parameter"]
        if any(s.opcode == "partition-id" for s in _before(place, starts)):
            return True
        starts = [operand for number in fused if (operand := computation.operand(i, int(number))) is not None]
    makers = _before(computation, starts)
    called = [c for maker in makers if maker.opcode == "fusion" for c in maker.called["calls"]]
    return any(
        maker.opcode == "partition-id"
        for maker in (*makers, *(j for c in called for j in module.computations[c].instructions))
    )


def _before(computation: Computation, ends: list[Instruction]) -> list[Instruction]:
    """Returns the instructions of a computation from which `ends` are computed, with them."""
    found = {i.name: i for i in ends}
    waiting = list(ends)
    while waiting:
        for name in waiting.pop().operands:
            if name in computation.by_name and name not in found:
                found[name] = computation.by_name[name]
                waiting.append(found[name])
    return list(found.values())
