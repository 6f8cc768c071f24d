"""`collective-in-accumulation-loop`: gradients are added up over the replicas in every microbatch instead of once.

M microbatches then send M times the bytes. It happens where a loss is differentiated with respect to parameters that
are not typed varying, or where a user's own loop reduces inside. Gathers and scatters of ZeRO 3 belong in the loop and
are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from spmdkit.foundation.formatting import format_bytes
from spmdkit.plan.collectives_bill import Collective
from spmdkit.plan.finding import Finding
from spmdkit.plan.findings import CompiledStep
from spmdkit.plan.hlo.text import Shape


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields one finding for each reduction of gradients over replicas that a step makes more than once."""
    replicas = {"replica", *step.program.data_axes}
    for c in step.bill.rows:
        if c.op not in ("all_reduce", "reduce_scatter") or not c.in_loop or not replicas & set(c.axes):
            continue
        times = max((_times(step, c, shape) for shape in c.shapes), default=0)
        if times < 2:
            continue
        sent = "an unknown number of" if c.trip_count is None else f"{c.trip_count}"
        yield Finding(
            "warning",
            "collective-in-accumulation-loop",
            (
                f"{c.op} of gradients over {' x '.join(c.axes)} runs {sent} times a step inside a loop, "
                f"{format_bytes(c.bytes_at_least)} sent by each device; once would be "
                f"{format_bytes(c.bytes_at_least / times)}"
            ),
            c.source,
            (
                "Reduce after the loop: use sk.value_and_grad with microbatches, or add up local gradients and call "
                "sk.psum once."
            ),
        )


def _times(step: CompiledStep, c: Collective, shape: Shape) -> int:
    """Returns how often a step reduces the same parameter, as far as its number of elements tells; 0 for other
    arrays."""
    most = 0
    for leaf in step.program.layout:
        if not leaf.path.startswith("params") or shape.size < 2:
            continue
        full = 1
        for n in leaf.shape:
            full *= n
        runs = c.trip_count or 2
        parts = step.program.sizes["fsdp"]
        if shape.size in (full, full // parts):
            most = max(most, runs)
        elif len(leaf.shape) > 1 and shape.size in (full // leaf.shape[0], full // leaf.shape[0] // parts):
            most = max(most, runs // leaf.shape[0])
    return most
