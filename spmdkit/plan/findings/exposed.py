"""`exposed-communication`: the device waits for the collectives of one link for a large part of the step.

The wait is the time in the predicted step in which a transfer runs and no instruction does. Not reported for CPU, and
for GPUs that fake CPU devices replace: XLA's CPU compiler emits no asynchronous collectives.
"""

from __future__ import annotations

from collections.abc import Iterator

from spmdkit.foundation.formatting import format_bytes, format_seconds
from spmdkit.plan.attribution import OF_DATA_PARALLELISM
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding

SHARE = 0.2
"""Minimum share of the step: latencies and ends of loops always expose some of it."""
SMALLEST = 1e-4


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields at most one finding, of the link with the longest wait."""
    if step.target is None or step.target.compiler == "cpu" or step.time is None or not step.time.links:
        return
    time = step.time
    name, link = max(time.links.items(), key=lambda item: item[1].exposed_s)
    if link.exposed_s < max(SMALLEST, SHARE * time.step_s):
        return
    waits = {source: s for (of, source), s in time.whole.exposed.items() if of == name}
    source = max(waits, key=lambda at: waits[at])
    causes = {c.cause for c in step.bill.rows if c.source == source}
    yield Finding(
        "exposed-communication",
        (
            f"the device waits {format_seconds(link.exposed_s)} of {format_seconds(time.step_s)} for {name} "
            f"({format_bytes(link.bytes)} a step), {format_seconds(waits[source])} of it for this line: no instruction "
            "runs meanwhile"
        ),
        source,
        (
            "More examples per device: the bytes do not depend on the batch. Or fewer devices on this axis."
            if causes and causes <= OF_DATA_PARALLELISM
            else "Fewer devices on this axis, and more on data or fsdp; plan --search compares the meshes."
        ),
    )
