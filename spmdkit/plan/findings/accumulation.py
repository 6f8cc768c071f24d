"""`collective-in-accumulation-loop`: gradients are reduced over the replicas in every microbatch instead of once.

M microbatches then send M times the bytes. This happens if a loss is differentiated with respect to parameters that
are not typed varying, or if a user's loop contains a reduction. Gathers and scatters of ZeRO 3 belong in the loop and
are not reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from spmdkit.foundation.formatting import format_bytes, shown_axes
from spmdkit.plan.collectives_bill import Collective
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding
from spmdkit.plan.hlo.text import Shape


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields one finding for each reduction of gradients over replicas that runs more than once per step."""
    replicas = {"replica", *step.program.data_axes}
    for c in step.bill.rows:
        if c.op not in ("all_reduce", "reduce_scatter") or not c.in_loop or not replicas & set(c.axes):
            continue
        times = max((_times(step, c, shape) for shape in c.shapes), default=0)
        if times < 2:
            continue
        sent = "an unknown number of" if c.trip_count is None else f"{c.trip_count}"
        yield Finding(
            "collective-in-accumulation-loop",
            (
                f"{c.op} of gradients over {shown_axes(c.axes)} runs {sent} times a step inside a loop, "
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
    """Returns how often a step reduces the same parameter, identified by its number of elements; 0 for other arrays."""
    runs, parts = c.trip_count or 2, step.program.sizes["fsdp"]
    counts = [0]
    for leaf in step.program.layout if shape.size > 1 else ():
        full = math.prod(leaf.shape)
        if not leaf.path.startswith("params"):
            continue
        if shape.size in (full, full // parts):
            counts.append(runs)
        elif len(leaf.shape) > 1 and shape.size in (full // leaf.shape[0], full // leaf.shape[0] // parts):
            counts.append(runs // leaf.shape[0])
    return max(counts)
