"""Collectives inside `sk.manual`, addressed by logical axis names. Without mesh axes each is the identity. Outside a
manual part they raise ConfigError.

N: devices along the axes; `bytes`: size of the operand's shard. Bytes sent per device and call, with a ring:

    all_reduce      2 (N-1)/N bytes      the same sum on every device
    all_gather        (N-1)   bytes      backward: reduce_scatter, the same bytes
    reduce_scatter    (N-1)/N bytes      backward: all_gather
    all_to_all        (N-1)/N bytes      backward: all_to_all
    ring_shift                bytes      backward: ring_shift in the opposite direction

Source: Austin et al., "How to Scale Your Model" (2025), part 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest
from spmdkit.mesh.mesh import MODEL_AXES
from spmdkit.step import trace_context

Names = str | Sequence[str]


def axes(*names: str) -> tuple[str, ...]:
    """Returns the mesh axes of size > 1 that the logical names map to; `batch` maps to the axes that shard one
    replica's examples. Empty outside a program, and in a step with model axes of size one only. An unknown name raises
    ValueError."""
    context = trace_context.current()
    if context.sharding.mesh is None or context.sharding.form == "manual":
        return ()
    outer_axes = (*context.sharding.data_axes, *context.mapped_axes)
    mesh_axes: list[str] = []
    for name in names:
        if name not in context.options.logical_axes:
            raise ValueError(
                f"unknown name '{name}'.{nearest(name, context.options.logical_axes)} Known: "
                f"{', '.join(sorted(context.options.logical_axes))}."
            )
        name_axes = context.sharding.inner_axes if name == "batch" else context.options.logical_axes[name]
        context.usage.axes.update(name_axes)
        mesh_axes += [a for a in name_axes if context.sharding.size(a) > 1 and a in MODEL_AXES and a not in outer_axes]
    return tuple(dict.fromkeys(mesh_axes))


def axis_size(names: Names) -> int:
    """Returns the number of devices along the axes of `names`. Works outside a manual part too, except for `batch`,
    which raises ConfigError there."""
    mesh_axes = _axes_in_part("axis_size", names) if "batch" in _as_tuple(names) else _axes(names)
    return trace_context.current().sharding.size(*mesh_axes)


def axis_index(names: Names) -> jax.Array | int:
    """Returns this device's index along the axes of `names`, int32[]; 0 without axes. Only inside `sk.manual`."""
    mesh_axes = _axes_in_part("axis_index", names)
    return lax.axis_index(mesh_axes) if mesh_axes else 0


def all_reduce(x: jax.Array, names: Names) -> jax.Array:
    """Returns the sum of `x` over the devices along `names`. Raises ConfigError if `x` is already the same along one of
    them: the sum would be N times too large."""
    mesh_axes = _axes_in_part("all_reduce", names)
    if not mesh_axes:
        return x
    if same := [a for a in mesh_axes if compat.axes_are_typed() and a not in compat.varying_axes(x)]:
        raise ConfigError(
            f"all_reduce over {list(mesh_axes)}: the operand is already the same along {same}, and a sum would make it "
            f"{trace_context.current().sharding.size(*same)} times too large. Remove the reduction, or name only the "
            "axes along which it differs."
        )
    total: jax.Array = lax.psum(x, mesh_axes)
    return total


def all_gather(x: jax.Array, names: Names, dim: int) -> jax.Array:
    """Returns the shards along `names` concatenated on `dim`: [..., n, ...] -> [..., N n, ...]."""
    mesh_axes = _axes_in_part("all_gather", names)
    return lax.all_gather(x, mesh_axes, axis=dim, tiled=True) if mesh_axes else x


def reduce_scatter(x: jax.Array, names: Names, dim: int) -> jax.Array:
    """Returns this device's shard, on `dim`, of the sum over `names`: [..., N n, ...] -> [..., n, ...]."""
    mesh_axes = _axes_in_part("reduce_scatter", names)
    return lax.psum_scatter(x, mesh_axes, scatter_dimension=dim, tiled=True) if mesh_axes else x


def all_to_all(x: jax.Array, names: Names, split_dim: int, join_dim: int) -> jax.Array:
    """Returns `x` split on `split_dim` and joined on `join_dim`: the sharding moves from `join_dim` to `split_dim`."""
    mesh_axes = _axes_in_part("all_to_all", names)
    return lax.all_to_all(x, mesh_axes, split_axis=split_dim, concat_axis=join_dim, tiled=True) if mesh_axes else x


def ring_shift(x: jax.Array, name: str, by: int = 1) -> jax.Array:
    """Returns the `x` of the device `by` positions before this one in the ring along the single axis of `name`."""
    mesh_axes = _axes_in_part("ring_shift", name)
    if not mesh_axes:
        return x
    if len(mesh_axes) > 1:
        raise ConfigError(f"ring_shift over '{name}': it has the axes {list(mesh_axes)}. A ring runs along one axis.")
    num = trace_context.current().sharding.size(*mesh_axes)
    shifted: jax.Array = lax.ppermute(x, mesh_axes[0], [(i, (i + by) % num) for i in range(num)])
    return shifted


def _axes(names: Names) -> tuple[str, ...]:
    return axes(*_as_tuple(names))


def _as_tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _axes_in_part(name: str, names: Names) -> tuple[str, ...]:
    """Returns the mesh axes of `names` for a collective. Raises ConfigError outside a manual part on a mesh of several
    devices: arrays are not shards there, and nothing would be sent."""
    context = trace_context.current()
    mesh = context.sharding.mesh
    if not trace_context.is_in_part() and mesh is not None and mesh.size > 1:
        raise ConfigError(
            f"spmdkit.ops.collectives.{name} over {names!r} is called outside of sk.manual, on a mesh of {mesh.size} "
            "devices. Outside of a part an array is not a shard, and nothing would be sent: the result would differ "
            "on each mesh. Over replicas write sk.all_gather(x), sk.psum(x), sk.pmean(x) or sk.num_replicas() in the "
            "loss; over model axes move the code into sk.manual(fn, in_dims, out_dims)."
        )
    return _axes(names)
