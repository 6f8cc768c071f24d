"""`padded-dim`: a dim of heads, of a vocabulary or of rows is sharded unevenly, so every device computes with padding.

XLA divides a dim of n over k devices into parts of ceil(n / k). `sk.shard` leaves such a dim unsharded instead. Read
from the sharding constraints in the jaxpr.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jax.sharding import NamedSharding

from spmdkit.foundation.formatting import format_bytes, shown_axes
from spmdkit.foundation.jaxprs import equations
from spmdkit.plan.compiled_step import MIN_WIRE_BYTES, CompiledStep
from spmdkit.plan.findings import Finding
from spmdkit.plan.jaxpr_lines import line

SHARE = 0.05
"""Minimum share of padding."""


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields one finding for each line that shards a dim unevenly."""
    for eqn in equations(step.jaxpr):
        sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None
        if not isinstance(sharding, NamedSharding):
            continue
        aval = eqn.invars[0].aval
        for length, axes in zip(aval.shape, sharding.spec, strict=False):
            names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
            num = math.prod(sharding.mesh.shape[name] for name in names if isinstance(name, str))
            part = -(-length // num)
            wasted = math.prod(aval.shape) * aval.dtype.itemsize * (part * num - length) // max(length, 1)
            if part * num - length < SHARE * length or wasted < MIN_WIRE_BYTES:
                continue
            yield Finding(
                "padded-dim",
                (
                    f"{length} over {shown_axes(names)} ({num}) is padded to {part * num}: "
                    f"{(part * num - length) / length:.0%} more in {aval.str_short()} ({format_bytes(wasted)})"
                ),
                line(eqn),
                f"Make the dim a multiple of {num}: {part * num}; or shard it over fewer devices.",
            )
