"""`many-small-all-reduces`: a step reduces many small arrays one after another, and each costs a link's latency.

XLA merges reductions that do not depend on each other. What remains is a loop that reduces in each iteration, or a
chain of sums. For GPUs that fake CPU devices replace, only loops are reported: that compiler merges less.
"""

from __future__ import annotations

from collections.abc import Iterator

from spmdkit.foundation.formatting import format_bytes, shown_axes
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding

MIN_RUNS = 100
SMALL_BYTES = 2**14
"""A sum of at most this size takes about the latency of a link."""


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields one finding for each line with many small all_reduces over the same axes."""
    for c in step.bill.rows:
        runs = c.count * (c.trip_count or 1)
        if step.is_substitute and not c.in_loop:
            continue
        if c.op != "all_reduce" or not c.counted or runs < MIN_RUNS or c.bytes_at_least > SMALL_BYTES * runs:
            continue
        yield Finding(
            "many-small-all-reduces",
            (
                f"{runs} all_reduce over {shown_axes(c.axes)} a step, each of {format_bytes(c.bytes_at_least / runs)}: "
                "each takes the latency of the link"
            ),
            c.source,
            "Collect the values and reduce them together: one sk.psum of the stacked array, after the loop.",
        )
