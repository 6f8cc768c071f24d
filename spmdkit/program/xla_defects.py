"""Programs that XLA is known to compile silently into wrong ones; they are rejected before they are compiled.

Two defects are known (jaxlib 0.10.2): integers of less than 4 bits on several CPU devices (`check_dtypes`), and the
gradient of a max or min pool with windows that overlap by half or more, along a sharded dim: `select_and_scatter_add`
with window >= 2 * stride. Reproduction and measurements of the second: docs/development/xla_pool.md.

A dim is sharded by an activation constraint (`sk.shard`), or by propagation from one. So a pool is correct only if its
operand is gathered directly before it, or if no constraint shards that dim of an array with the same number of dims,
nor any dim over `context` (a reshape may have moved it). In `shard_map` arrays are shards and nothing is partitioned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation import jaxprs
from spmdkit.foundation.trees import describe, dtype_bits, named_leaves
from spmdkit.mesh.mesh import dim_axes

MANUAL = ("shard_map", "spmdkit_manual")
"""Primitives with shards as their inner arrays."""


Cuts = dict[int, list[str]]
"""Dim -> the mesh axes larger than one that shard it."""


def check_pools(jaxpr: Any, sizes: Mapping[str, int], what: str) -> None:
    """Raises ConfigError for a pool with overlapping windows along a sharded dim."""
    if all(size == 1 for size in sizes.values()):
        return
    cuts = [(rank, cut) for spec, rank in _constraints(jaxpr) if (cut := _sharded_dims(spec, sizes))]
    if not cuts:
        return
    for eqn, spec in _pools(jaxpr):
        window, stride = eqn.params["window_dimensions"], eqn.params["window_strides"]
        for dim in (d for d in range(len(window)) if window[d] > 1 and window[d] >= 2 * stride[d]):
            if axes := _axes_along(dim, len(window), spec, cuts, sizes):
                shape = eqn.outvars[0].aval.shape
                raise ConfigError(
                    f"{what} pools an array of shape {shape} in windows of {window[dim]} every {stride[dim]} along "
                    f"dim {dim}, and the mesh may shard that dim over {', '.join(axes)} "
                    f"({', '.join(str(sizes[a]) for a in axes)}). XLA silently computes a wrong gradient of a max or "
                    "min pool if its windows are at least twice the stride and the dim is sharded "
                    '(docs/xla_pool.md). Replicate that dim just before the pool, x = sk.shard(x, "batch", None, '
                    "None, None), use a stride of more than half the window, or a mesh that does not shard it.\n  "
                    f"{compat.source_line(eqn)}"
                )


def check_dtypes(state: Any, devices: Sequence[Any]) -> None:
    """Raises ConfigError for a state with integers of less than 4 bits on several CPU devices: a gather of them
    corrupts the memory of the process (jaxlib 0.10.2)."""
    if len(devices) == 1 or devices[0].platform != "cpu":
        return
    for path, leaf in named_leaves(state):
        if jnp.issubdtype(leaf.dtype, jnp.integer) and dtype_bits(leaf.dtype) < 4:
            raise ConfigError(
                f"the state's leaf '{path}' is {describe(leaf)} on {len(devices)} CPU devices. XLA cannot send "
                "integers of less than 4 bits between CPU devices. Store them as int4 or int8, or use devices: cpu:1."
            )


def _axes_along(
    dim: int, rank: int, spec: PartitionSpec | None, cuts: list[tuple[int, Cuts]], sizes: Mapping[str, int]
) -> list[str]:
    """Returns the mesh axes that may shard `dim` of a pool's operand, a result of the constraint `spec` (or None)."""
    if spec is not None:
        return _sharded_dims(spec, sizes).get(dim, [])
    along_dim = {axis for length, cut in cuts if length == rank for axis in cut.get(dim, [])}
    anywhere = {axis for _, cut in cuts for axes in cut.values() for axis in axes}
    return sorted(along_dim | (anywhere & {"context"}))


def _sharded_dims(spec: PartitionSpec, sizes: Mapping[str, int]) -> Cuts:
    known = {dim: dim_axes(of) for dim, of in enumerate(spec) if of is not PartitionSpec.UNCONSTRAINED}
    large = {dim: [a for a in axes if sizes.get(a, 1) > 1] for dim, axes in known.items()}
    return {dim: axes for dim, axes in large.items() if axes}


def _constraints(jaxpr: Any) -> Iterator[tuple[PartitionSpec, int]]:
    for inner in _partitioned(jaxpr):
        for eqn in inner.eqns:
            if (spec := _spec_of(eqn)) is not None:
                yield spec, eqn.outvars[0].aval.ndim


def _pools(jaxpr: Any) -> Iterator[tuple[Any, PartitionSpec | None]]:
    """Yields the gradients of pools, each with the spec of the constraint that produced its operand."""
    for inner in _partitioned(jaxpr):
        producers = {id(var): eqn for eqn in inner.eqns for var in eqn.outvars}
        for eqn in inner.eqns:
            if eqn.primitive.name == "select_and_scatter_add":
                producer = producers.get(id(eqn.invars[1]))
                yield eqn, None if producer is None else _spec_of(producer)


def _partitioned(jaxpr: Any) -> Iterator[Any]:
    return jaxprs.bodies(jaxpr, into=lambda eqn: eqn.primitive.name not in MANUAL)


def _spec_of(eqn: Any) -> PartitionSpec | None:
    if eqn.primitive.name != "sharding_constraint":
        return None
    return getattr(eqn.params["sharding"], "spec", None)
