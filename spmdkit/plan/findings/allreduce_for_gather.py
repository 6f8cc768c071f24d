"""`all-reduce-for-gather`: the compiler emits an all_reduce where the strategy needs only a gather or a scatter.

An all_gather emitted as an all_reduce of shards padded with zeros sends twice the bytes; so does a reduce_scatter
emitted as an all_reduce of which each device retains one part. Measured with the TPU compiler (jax 0.10.2, v5p): only
for a group over the full torus. Not reported for CPU, where XLA's compiler has no alternative for some.
"""

from __future__ import annotations

from collections.abc import Iterator

from spmdkit.foundation.formatting import format_bytes, shown_axes
from spmdkit.plan.collectives_bill import Collective
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields one finding for each op and axes, with the bytes of all such operations together."""
    first = next(iter(step.program.mesh.devices.flat))
    if first.platform == "cpu" or step.program.zero == 1:  # ZeRO 1 needs the full sum
        return
    together: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for c in step.bill.rows:
        if c.emulated_op is not None and c.op == "all_reduce":
            together.setdefault((c.emulated_op, c.axes), []).append(c)
    for (meant, axes), rows in together.items():
        sent = sum(c.bytes_at_least for c in rows)
        if sent < max(2**20, step.bill.bytes_at_least // 10):
            continue
        largest = max(rows, key=lambda c: c.bytes_at_least)
        yield Finding(
            "all-reduce-for-gather",
            (
                f"the compiler sends {sum(c.count for c in rows)} all_reduce over {shown_axes(axes)} where a {meant} "
                f"would do: {format_bytes(sent)} instead of {format_bytes(sent / 2)} a step"
            ),
            largest.source,
            (
                f"Let {axes[-1]} span a part of the torus: half of it, and the rest as data or replica; or try more "
                "examples per device."
            ),
        )
