"""`lower_bound_bytes`: the bytes that a device sends per step over the replica and fsdp axes, by the formulas of data
parallelism and ZeRO.

P is the parameter bytes of one device after the fsdp gather, in the compute dtype. G is the bytes of their gradient, in
the reduction dtype (ZeRO 3: in the compute dtype if that is smaller, since the transpose of the gather scatters it):

| axes                   | communication                                         | bytes sent per device       |
| ---------------------- | ----------------------------------------------------- | --------------------------- |
| replica x data, r long | one all_reduce of the fsdp shard of the gradient      | 2 (r-1)/r * G / f           |
| fsdp, f long, ZeRO 3   | gather forward, gather backward, scatter the gradient | 2 (f-1)/f * P + (f-1)/f * G |
| fsdp, ZeRO 2           | scatter the gradient, gather the new parameters       | (f-1)/f * (G + S)           |
| fsdp, ZeRO 1           | reduce the gradient, gather the new parameters        | (f-1)/f * (2 G + S)         |

S is the bytes of the stored parameters. The gradient of leaves that fsdp does not shard is reduced over fsdp too. With
several microbatches ZeRO 3 gathers in each; the table assumes one. A program may send less: `sk.embed` sends vectors
instead of its table, and arrays that are not recomputed are gathered once. Other model axes are excluded.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from spmdkit.communication.reducers.base import ReducedLeaf, value_bytes
from spmdkit.mesh.mesh import REPLICA_AXES, count, spec_axes
from spmdkit.program.memory import shard_bytes
from spmdkit.program.program import Program


def lower_bound_bytes(program: Program) -> dict[str, int]:
    """Returns axes -> bytes that one device sends per step by the formulas, for the replica axes and for fsdp."""
    config = program.config
    sizes = program.sizes if program.groups is None else program.groups.inner(program.sizes)
    replicas, f = count(sizes, REPLICA_AXES), sizes["fsdp"]
    of_replicas, by_reducer = {a: sizes[a] for a in REPLICA_AXES if sizes[a] > 1}, list[ReducedLeaf]()
    compute = jnp.dtype(config.precision.compute).itemsize
    reduce = jnp.dtype(config.precision.reduction).itemsize
    totals = {"replica x data": 0.0, "fsdp": 0.0}
    for leaf in program.layout:
        if not leaf.path.startswith("params"):
            continue
        stored = shard_bytes(leaf.shape, leaf.dtype, leaf.sharding(program.mesh))
        axes = set(spec_axes(leaf.spec))
        is_cut = "fsdp" in axes
        elements = stored / leaf.dtype.itemsize * (f if is_cut else 1)
        p, g, s = elements * compute, elements * reduce, elements * leaf.dtype.itemsize
        values = elements / (f if is_cut or config.layout.zero == 2 else 1)
        if replicas > 1 and not program.reducer.is_sum:
            part = leaf.sharding(program.mesh).shard_shape(leaf.shape)
            shape = part if math.prod(part) == round(values) else (round(values),)
            by_reducer.append(
                ReducedLeaf(leaf.path, shape, of_replicas, (), value_bytes=value_bytes(config.precision.reduction))
            )
        else:
            totals["replica x data"] += 2 * (replicas - 1) / replicas * values * reduce
        share = (f - 1) / f
        if config.layout.zero == 3:
            totals["fsdp"] += share * (2 * p + g) if is_cut else share * 2 * g
        else:
            totals["fsdp"] += share * ((2 if config.layout.zero == 1 else 1) * g + s)
    totals["replica x data"] += program.reducer.bytes_sent(by_reducer)
    return {name: round(num) for name, num in totals.items() if num}
