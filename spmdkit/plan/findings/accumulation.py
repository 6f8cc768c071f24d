"""`collective-in-accumulation-loop`: gradients are reduced over the replicas in every microbatch instead of once.

M microbatches then send M times the bytes. This happens if a loss is differentiated with respect to parameters that
are not typed varying, or if a user's loop contains a reduction. Loops inside the differentiated function (stacked
layers) reduce other parameters in each iteration and are not reported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from spmdkit.foundation.formatting import format_bytes, shown_axes
from spmdkit.plan.collectives_bill import Collective
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding

_DIFFERENTIATED = re.compile(r"\b(?:jvp|transpose)\(")
_LOOP = re.compile(r"/while(?=/body)")


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields one finding for each reduction of gradients over replicas that runs more than once per step."""
    replicas = {"replica", *step.program.data_axes}
    for c in step.bill.rows:
        if c.cause not in ("gradient reduction", "gradient scatter") or not replicas & set(c.axes):
            continue
        times = _times(step, c)
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


def _times(step: CompiledStep, c: Collective) -> int:
    """Returns how often a step reduces the same gradient: the executions of the loops around the differentiation, from
    the name of the operation. A loop of unknown length counts as two."""
    outside = _DIFFERENTIATED.split(c.op_name)[0]
    return math.prod(step.scans.get(outside[: loop.end()], 2) for loop in _LOOP.finditer(outside))
