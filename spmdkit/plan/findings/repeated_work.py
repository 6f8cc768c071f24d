"""`repeated-work`: every replica computes the same values, since the inputs of a line do not come from the batch.

In a global `train_step` the partitioner distributes work that depends on the batch. Data that does not depend on it
(collocation points, rollouts, a loop over weights) is replicated, and so is all work on it, including its gradient.

    FLOPs of the line's products on one device  *  devices  >=  replicas ** REPEATED  *  FLOPs of the line in the step

The left side equals the FLOPs of the line for distributed work, `replicas` times that for repeated work. XLA merges
products that the traced step has twice, which reduces both by a factor up to two. The right side counts work repeated
over other axes (tensor, context) in full, so a line is reported only if it is repeated along all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from spmdkit.mesh.mesh import BATCH_AXES
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.costs import Costs
from spmdkit.plan.findings import Finding
from spmdkit.plan.flops import products_by_line
from spmdkit.plan.hlo import loops
from spmdkit.plan.hlo.source import source_of
from spmdkit.plan.jaxpr_lines import line
from spmdkit.step import trace_context

REPEATED = 0.6
"""On a logarithmic scale from distributed (0) to repeated by every replica (1). Below 1, since XLA merges products and
attributes some to another line."""

SHARE = 0.1
"""Minimum share of a device's FLOPs: less repeated work is not worth a finding."""


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields at most one finding: the line with the most repeated work, and the number of other such lines."""
    program = step.program
    shards, num = program.batch_shards, program.mesh.size
    if shards < 2 or step.is_substitute:
        return
    replicas = program.sizes["replica"] * program.sizes["data"]
    times, others = replicas if replicas > 1 else shards, num // shards
    requested = products_by_line(step.jaxpr, line)
    computed = _computed_by_line(step)
    products = sum(computed.values())
    repeated = {
        at: flops
        for at, flops in computed.items()
        if not at.startswith("spmdkit/")
        and requested.get(at)
        and flops * num >= times**REPEATED * others * requested[at]
    }
    total = sum(repeated.values())
    if not repeated or total < SHARE * products:
        return
    at = max(repeated, key=lambda at: repeated[at])
    axes = " x ".join(f"{a} {program.sizes[a]}" for a in BATCH_AXES if program.sizes[a] > 1)
    more = f", and so are those of {len(repeated) - 1} more lines" if len(repeated) > 1 else ""
    factor = min(repeated[at] * num / requested[at], times * others)
    yield Finding(
        "repeated-work",
        (
            f"the products of this line ({repeated[at]:.3g} FLOP a step on a device{more}) are computed {factor:.3g} "
            f"times over on {axes}: {total / products:.0%} of what a device computes is what others compute too, since "
            "it is not made from the batch"
        ),
        at,
        (
            'Share it out by its first dim, where it is made: x = sk.shard(x, "rows", None), or begin with '
            "sk.sharded_arange(num), or put it into the batch (the loss of sk.value_and_grad sees one replica's rows)."
        ),
    )


def _computed_by_line(step: CompiledStep) -> dict[str, float]:
    """Returns the FLOPs of products that one device computes, by the user's line. Products of an optimizer are excluded
    (ZeRO shards them)."""
    costs, totals = Costs(step.module), defaultdict[str, float](float)
    for visit in loops.walk(step.module, step.scans):
        i = visit.instruction
        if i.opcode not in ("dot", "convolution") or trace_context.OPTIMIZER in i.op_name:
            continue
        if at := source_of(step.module, i):
            totals[at] += visit.known_runs * sum(costs.flops(i).values())
    return dict(totals)
