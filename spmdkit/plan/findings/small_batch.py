"""`batch-too-small`: communication of weights and gradients takes longer than the arithmetic of a device's examples.

The bytes that data parallelism and fsdp send do not depend on the batch; the arithmetic of a device does.

    tokens per device  <  peak FLOP/s / (bytes/s of the link) * (bytes sent / FLOPs per token)

Source: "How to Scale Your Model", chapter on training (data parallelism and FSDP become bound by communication).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from spmdkit.mesh.mesh import BATCH_AXES
from spmdkit.plan.attribution import OF_DATA_PARALLELISM
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding
from spmdkit.plan.flops import count
from spmdkit.plan.machine.links import link_path_of

FACTOR = 1.5
"""Minimum ratio of communication time to arithmetic time: both are estimates."""


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields at most one finding."""
    target, program = step.target, step.program
    if target is None or target.chip.kind == "cpu" or program.batch_shards < 2:
        return
    devices = list(program.mesh.devices.flat)
    computing = target.chip.products_s(count(step.jaxpr).by_dtype) / len(target.devices or devices)
    sending, largest = 0.0, None
    for c in step.bill.rows:
        if c.counted and c.cause in OF_DATA_PARALLELISM and set(c.axes) <= set(BATCH_AXES):
            way = link_path_of(target, devices, c)
            sending += c.bytes_at_least / (way.bytes_per_s * way.efficiency)
            largest = largest if largest and largest.bytes_at_least >= c.bytes_at_least else c
    if not computing or largest is None or sending < FACTOR * computing or sending < 1e-3:
        return
    rows = program.config.largest_batch / program.batch_shards
    yield Finding(
        "batch-too-small",
        (
            f"{program.config.largest_batch} examples on {program.batch_shards} shards are {rows:g} for each: "
            f"{computing * 1e3:.3g} ms of arithmetic a step, while weights and gradients take {sending * 1e3:.3g} ms "
            "on the wire"
        ),
        step.config_line("batch_size") or largest.source,
        (
            f"batch_size: {program.config.largest_batch * math.ceil(sending / computing)} would balance both; or use "
            "fewer devices, or give some of them to tensor or context."
        ),
    )
