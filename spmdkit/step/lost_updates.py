"""Measures the updates that do not change a bfloat16 parameter, since their sum is rounded to it.

    size = sum |u|,   lost = sum |u| where round(p + u) = p         one pair per leaf and device, each of its shard

Sums of sizes, not counts: an optimizer with momentum has updates close to zero for most rows of an embedding, and these
mean nothing. Of a large leaf a device reads at most `MAX_VALUES`, of all rows if possible. The host reads the pairs at
log steps (run/hooks/lost_updates.py).

Wire: nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmdkit import compat
from spmdkit.foundation.trees import named_leaves
from spmdkit.mesh.mesh import spec_axes
from spmdkit.step import trace_context
from spmdkit.step.leaf_roles import Roles
from spmdkit.step.trace_context import Context

MAX_VALUES = 1 << 16
"""Most values that a device reads of a leaf."""


def narrow_leaves(roles: Roles, params: Any) -> list[str]:
    """Returns the paths of the trained parameters in bfloat16."""
    return [path for path, x in named_leaves(params) if x.dtype == jnp.bfloat16 and path not in roles]


def sizes_of_updates(context: Context, params: Any, updates: Any) -> jax.Array | None:
    """Returns (size, lost) of the leaves of `narrow_leaves` in their order, float32[leaves, 2]; [parts, leaves, 2] if
    devices hold different parts of the leaves. None without such leaves, or if they are rounded stochastically."""
    paths = set(narrow_leaves(context.options.roles, params))
    if not paths or context.options.rounds_stochastically:
        return None
    leaves = [[x for path, x in named_leaves(tree) if path in paths] for tree in (params, updates)]
    mesh, placements = context.sharding.mesh, context.sharding.placements
    with jax.named_scope(trace_context.GUARD):
        if context.inside or mesh is None or not (all_axes := context.sharding.larger(mesh.axis_names)):
            return _stacked(_sizes(*leaves))
        specs = [PartitionSpec()] * len(paths)
        if context.sharding.form != "manual" and placements is not None:
            specs = [spec for path, spec in named_leaves(placements.of(params).update) if path in paths]
        sharding_axes = {a for spec in specs for a in spec_axes(spec)}
        axes = tuple(a for a in all_axes if a in sharding_axes)

        def of_device(*leaves: Sequence[jax.Array]) -> list[jax.Array]:
            sizes = compat.as_varying(_sizes(*leaves), axes)
            return [x[None] if axes else x for x in sizes]

        out = PartitionSpec(axes) if axes else PartitionSpec()
        return _stacked(jax.shard_map(of_device, mesh=mesh, in_specs=(specs,) * 2, out_specs=out)(*leaves))


def _sizes(params: Sequence[jax.Array], updates: Sequence[jax.Array]) -> list[jax.Array]:
    sizes = []
    for param, update in zip(params, updates, strict=True):
        p, u = _sample(param), _sample(update)
        size = jnp.abs(u.astype(jnp.float32))
        is_lost = _bits((p + u).astype(p.dtype)) == _bits(p)  # XLA may omit the rounding of numbers that it compares
        sizes += [size.sum(), jnp.where(is_lost, size, 0).sum()]
    return sizes


def _sample(x: jax.Array) -> jax.Array:
    """Returns every value, or at most `MAX_VALUES` at equal distances, which skip along the last dims first."""
    if x.size <= MAX_VALUES:
        return x
    strides, num = [1] * x.ndim, 1
    for dim in reversed(range(x.ndim)):
        most = max(1, MAX_VALUES // (num * math.prod(x.shape[:dim])))
        strides[dim] = -(-x.shape[dim] // most)
        num *= -(-x.shape[dim] // strides[dim])
    return lax.slice(x, [0] * x.ndim, x.shape, strides)


def _stacked(sizes: Sequence[jax.Array]) -> jax.Array:
    """Returns [..., leaves, 2]. Outside of `shard_map`: a `vmap` over groups cannot stack there."""
    return jnp.stack(sizes, -1).reshape(*sizes[0].shape, -1, 2)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint16)
