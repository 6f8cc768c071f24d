"""The guard of a step: one code per device that shows whether loss, gradient and metrics are finite, and the handling
of a non-finite step.

    code      0, or the sum of LOSS, GRADIENT and METRICS (non-finite) and SPIKE (the loss exceeds the host's limit)
    stop      each device checks its shard of the gradient; the host combines the codes: no communication
    skip      the codes are combined in the step; a non-finite step changes nothing but the step number
    rollback  the codes are combined as in skip: every process has the step to return to

The guard checks the gradient passed to `state.apply_gradients`, in the sharding of the update. If a step never calls
it, or calls it inside a user's loop, branch or `jit`, the guard checks the new parameters instead.

Wire: nothing, or one all-reduce of a scalar over all devices. Reads the gradient once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdkit import compat
from spmdkit.foundation.trees import named_leaves
from spmdkit.mesh.mesh import REPLICA_AXES, spec_axes
from spmdkit.step import trace_context
from spmdkit.step.metrics.base import is_metric
from spmdkit.step.state import TrainState
from spmdkit.step.trace_context import Context

LOSS, GRADIENT, METRICS, SPIKE = 1, 2, 4, 8
Metrics = Mapping[str, Any]
KINDS = {"loss": LOSS, "gradient": GRADIENT, "metrics": METRICS, "spike": SPIKE}
"""Name of a check in the config -> its bit in a code."""


Trees = Sequence[Any] | None
"""Gradients passed to the optimizer, one tree per call; None: the new parameters are checked."""


def apply_guard(
    context: Context, old: TrainState, new: TrainState, metrics: Metrics, gradients: Trees, limit: Any = None
) -> tuple[TrainState, jax.Array | None]:
    """Returns (the state after the step, its code). The code is int32[], or int32[parts] if it is not combined and the
    devices hold different parts of the gradient.

    `limit`: a larger loss counts as a spike.
    """
    code = guard_code(context, new.params, metrics, gradients, limit)
    if code is not None and guard_skips(context):
        with jax.named_scope(trace_context.GUARD):
            skip = is_skipped(context, code)
            selected = jax.tree.map(lambda a, b: jnp.where(skip, a, b), old, new)
        new = selected.replace(step=new.step, rng=new.rng)  # shared by all groups; rng never changes
    return new, code


def guard_skips(context: Context) -> bool:
    """Returns whether the guard can skip a step."""
    return context.options.guard is not None and bool(context.options.guard.skips)


def is_skipped(context: Context, code: jax.Array) -> jax.Array:
    """Returns bool[]: whether a step with this code leaves the state unchanged."""
    assert context.options.guard is not None
    return code & context.options.guard.skips != 0


def guard_code(
    context: Context, params: Any, metrics: Metrics, gradients: Trees, limit: Any = None
) -> jax.Array | None:
    """Returns the code of a step, as `apply_guard`; None without a guard."""
    guard = context.options.guard
    if guard is None:
        return None
    with jax.named_scope(trace_context.GUARD):
        code: jax.Array = jnp.int32(_metrics_code(guard, metrics))
        if limit is not None and "loss" in metrics:
            loss = metrics["loss"].value if is_metric(metrics["loss"]) else metrics["loss"]
            code = code | jnp.where(jnp.isfinite(loss) & (loss.astype(jnp.float32) > limit), SPIKE, 0)
        if guard.looks & GRADIENT:
            code = _gradient_code(context, code, [params] if gradients is None else gradients)
    return code


def _metrics_code(guard: trace_context.GuardSettings, metrics: Metrics) -> Any:
    """Returns the bits of the loss and the metrics, which are the same on every device."""
    code: Any = 0
    for name, metric in metrics.items():
        bit = guard.looks & (LOSS if name == "loss" else METRICS)
        value = metric.value if is_metric(metric) else metric
        if bit and jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            code = code | jnp.where(jnp.isfinite(value).all(), 0, bit)
    return code


def _gradient_code(context: Context, code: jax.Array, gradients: Sequence[Any]) -> jax.Array:
    """Returns the code with the gradient's bit: of this device's parts, or joined over all devices."""
    guard, placements = context.options.guard, context.sharding.placements
    assert guard is not None
    leaves, mesh = jax.tree.leaves(list(gradients)), context.sharding.mesh
    platform = context.platform
    all_axes = context.sharding.larger(() if mesh is None else mesh.axis_names)
    if context.inside or not all_axes:
        # Values that other axes shard are not sliced here: the partitioner would communicate.
        is_whole = all(a in REPLICA_AXES for a in all_axes)
        bad = _any_nonfinite(leaves, platform if is_whole else None)
        # An invariant gradient is reduced only over axes of size one, so nothing is sent.
        axes = REPLICA_AXES if guard.joins else tuple(compat.varying_axes(bad))
        return code | GRADIENT * (lax.pmax(compat.as_varying(bad, axes), axes) if context.inside and axes else bad)
    whole = [PartitionSpec()] * len(leaves)
    split = context.sharding.form != "manual" and placements is not None
    specs = [s for g in gradients for s in jax.tree.leaves(placements.of(g).update)] if split and placements else whole
    sharding_axes = {a for spec in specs for a in spec_axes(spec)}
    axes = all_axes if guard.joins else tuple(a for a in all_axes if a in sharding_axes)

    def of_device(leaves: Sequence[jax.Array], code: jax.Array) -> jax.Array:
        bad = compat.as_varying(_any_nonfinite(leaves, platform), axes)
        code = code | GRADIENT * (lax.pmax(bad, axes) if guard.joins else bad)
        return code[None] if axes and not guard.joins else code

    out = PartitionSpec(axes) if axes and not guard.joins else PartitionSpec()
    mapped = jax.shard_map(of_device, mesh=mesh, in_specs=(specs, PartitionSpec()), out_specs=out)
    return mapped(leaves, code)


def _any_nonfinite(leaves: Sequence[jax.Array], platform: str | None) -> jax.Array:
    finite = (is_finite(x, platform) for x in leaves)
    return jnp.logical_not(functools.reduce(jnp.logical_and, finite, jnp.array(True))).astype(jnp.int32)


def non_finite_leaf(mesh: Mesh, tree: Any) -> str | None:
    """Returns the path of the first leaf with a NaN or an infinity, or None. Waits for the devices of `mesh`."""
    floats = {path: x for path, x in named_leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)}
    return next((path for path, ok in jax.device_get(_check_each(mesh)(floats)).items() if not ok), None)


def all_finite(mesh: Mesh, tree: Any) -> bool:
    """Returns whether all leaves are finite, the same on every process. Waits for the devices of `mesh`."""
    return bool(_check_all(mesh)(tree))


@functools.cache
def _check_each(mesh: Mesh) -> Any:
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda leaves: {path: jnp.isfinite(x).all() for path, x in leaves.items()}, out_shardings=whole)


@functools.cache
def _check_all(mesh: Mesh) -> Any:
    """Returns the compiled `tree -> bool[]`, the same on every device."""

    def finite(tree: Any) -> jax.Array:
        return functools.reduce(jnp.logical_and, map(is_finite, jax.tree.leaves(tree)), jnp.array(True))

    return jax.jit(finite, out_shardings=NamedSharding(mesh, PartitionSpec()))


FIRST_PARTS, MAX_PARTS, WINDOW, FEW = 8, 31, 32, 1 << 11
"""Reduction of arrays on CPU: number of parts combined in the first loop (LLVM does not vectorize more); in later loops
(more than 15, so that XLA does not fuse both); the dim above which XLA reduces by windows, element by element; the
number of elements reduced directly, which keeps programs with many small leaves small."""


def is_finite(x: jax.Array, platform: str | None = None) -> jax.Array:
    """Returns bool[]: whether an array has no NaN and no infinity. Reads it once.

    Args:
        platform: platform of the devices, if each holds the array or a local part of it; None if it may be sharded. On
            `cpu`, parts are combined until few elements remain: 0.4 % of a 10 ms step with a gradient of 6.4 MiB. Only
            the first combination: 1.7 % (two devices, jaxlib 0.10.2, 2026-11-25).
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact) or not x.size:
        return jnp.array(True)
    if platform != "cpu" or x.size <= WINDOW:
        return jnp.isfinite(x).all()
    joined = functools.reduce(jnp.logical_and, map(jnp.isfinite, _parts(x, FIRST_PARTS)))
    while joined.size > FEW and max(joined.shape) > WINDOW:
        joined = functools.reduce(jnp.logical_and, _parts(joined, MAX_PARTS))
    return joined.all()


def _parts(x: jax.Array, most: int) -> list[jax.Array]:
    """Returns at most `most` parts of equal size along the first long dim; the last one may overlap."""
    axis = next((axis for axis, size in enumerate(x.shape) if size > WINDOW), int(np.argmax(x.shape)))
    size = x.shape[axis]
    part_size = -(-size // most)
    starts = [min(start, size - part_size) for start in range(0, size, part_size)]
    return [lax.slice_in_dim(x, start, start + part_size, axis=axis) for start in starts]
