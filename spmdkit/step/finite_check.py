"""The guard of a step: one code per device that shows whether loss, gradient and metrics are finite, the handling of a
non-finite step, and the norm of the gradient.

    code      0, or the sum of LOSS, GRADIENT and METRICS (non-finite) and SPIKE (the loss exceeds the host's limit)
    stop      each device checks its shard of the gradient; the host combines the codes: no communication
    skip      the codes are combined in the step; a non-finite step changes nothing but the step number
    rollback  the codes are combined as in skip: every process has the step to return to

The guard checks the gradient passed to `state.apply_gradients`, in the sharding of the update. If a step never calls
it, or calls it inside a user's loop, branch or `jit`, the guard checks the new parameters instead.

One read of the gradient gives both results of a device, from the sum of min(g * g, 1e28) + 0 * g over its part. It is
NaN if and only if a value is not finite; otherwise it is the sum of squares. A leaf that N devices hold counts 1/N on
each of them, so the host adds the sums of all devices (`gradient_norm`). With `clip_norm`, the norm is the one that
clipping computes.

Wire: nothing, or one all-reduce of a scalar over all devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdkit import compat
from spmdkit.foundation.trees import common_dtype, named_leaves
from spmdkit.mesh.mesh import REPLICA_AXES, spec_axes
from spmdkit.step import trace_context
from spmdkit.step.metrics.base import is_metric
from spmdkit.step.reducer_io import ReducerSlots
from spmdkit.step.state import TrainState
from spmdkit.step.trace_context import Context

LOSS, GRADIENT, METRICS, SPIKE = 1, 2, 4, 8
Metrics = Mapping[str, Any]
KINDS = {"loss": LOSS, "gradient": GRADIENT, "metrics": METRICS, "spike": SPIKE}
"""Name of a check in the config -> its bit in a code."""


def apply_guard(
    context: Context, old: TrainState, new: TrainState, metrics: Metrics, slots: ReducerSlots, limit: Any = None
) -> tuple[TrainState, jax.Array | None, jax.Array | None]:
    """Returns (the state after the step, its code, the squares of its gradient). See `guard_code`."""
    code, squares = guard_code(context, new.params, metrics, slots, limit)
    if code is not None and guard_skips(context):
        with jax.named_scope(trace_context.GUARD):
            skip = is_skipped(context, code)
            selected = jax.tree.map(lambda a, b: jnp.where(skip, a, b), old, new)
        new = selected.replace(step=new.step, rng=new.rng)  # shared by all groups; rng never changes
    return new, code, squares


def guard_skips(context: Context) -> bool:
    """Returns whether the guard can skip a step."""
    return context.options.guard is not None and bool(context.options.guard.skips)


def is_skipped(context: Context, code: jax.Array) -> jax.Array:
    """Returns bool[]: whether a step with this code leaves the state unchanged."""
    assert context.options.guard is not None
    return code & context.options.guard.skips != 0


def guard_code(
    context: Context, params: Any, metrics: Metrics, slots: ReducerSlots, limit: Any = None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns (the code of a step, the squares of its gradient).

    The code is int32[], or int32[parts] if it is not combined and the devices hold different parts of the gradient;
    None without a guard. The squares are float32[], or float32[parts], with the square of the gradient's norm as their
    sum; None if the step passes no gradient to the optimizer, or in a loop.

    Args:
        params: the new parameters, which are checked if there is no gradient.
        slots: the gradients passed to the optimizer.
        limit: a larger loss counts as a spike.
    """
    guard, gradients = context.options.guard, slots.update_gradients
    code: jax.Array | None = None
    with jax.named_scope(trace_context.GUARD):
        if guard is not None:
            code = jnp.int32(_metrics_code(guard, metrics))
            if limit is not None and "loss" in metrics:
                loss = metrics["loss"].value if is_metric(metrics["loss"]) else metrics["loss"]
                code = code | jnp.where(jnp.isfinite(loss) & (loss.astype(jnp.float32) > limit), SPIKE, 0)
        is_checked = guard is not None and bool(guard.looks & GRADIENT)
        if not is_checked and (gradients is None or slots.clipped_squares is not None):
            return code, slots.clipped_squares
        bad, squares = _of_gradient(context, [params] if gradients is None else gradients, guard)
        if code is not None and is_checked:
            code = code | GRADIENT * bad
    if slots.clipped_squares is not None:
        return code, slots.clipped_squares
    return code, None if gradients is None else squares


def _metrics_code(guard: trace_context.GuardSettings, metrics: Metrics) -> Any:
    """Returns the bits of the loss and the metrics, which are the same on every device."""
    code: Any = 0
    for name, metric in metrics.items():
        bit = guard.looks & (LOSS if name == "loss" else METRICS)
        value = metric.value if is_metric(metric) else metric
        if bit and jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            code = code | jnp.where(jnp.isfinite(value).all(), 0, bit)
    return code


def _of_gradient(
    context: Context, gradients: Sequence[Any], guard: trace_context.GuardSettings | None
) -> tuple[jax.Array, jax.Array]:
    """Returns (int32, 1 if a value is not finite; the squares), of this device's parts, or joined over all devices."""
    placements, mesh, platform = context.sharding.placements, context.sharding.mesh, context.platform
    named = [pair for tree in gradients for pair in named_leaves(tree)]
    leaves, roles = [x for _, x in named], context.options.roles
    counted = [roles.get(path) != "overwritten" for path, _ in named]
    joins = guard is not None and guard.joins
    all_axes = context.sharding.larger(() if mesh is None else mesh.axis_names)
    if context.inside or not all_axes:
        # Values that other axes shard are not sliced here: the partitioner would communicate.
        is_whole = all(a in REPLICA_AXES for a in all_axes)
        bad, squares = _bad_and_squares(leaves, [float(x) for x in counted], platform if is_whole else None)
        if not context.inside:
            return bad, squares
        # An invariant gradient is reduced only over axes of size one, so nothing is sent.
        axes = REPLICA_AXES if joins else tuple(compat.varying_axes(bad))
        bad = lax.pmax(compat.as_varying(bad, axes), axes) if axes else bad
        trivial = tuple(compat.varying_axes(squares))
        return bad, lax.pmax(squares, trivial) if trivial else squares
    specs = [PartitionSpec()] * len(leaves)
    if context.sharding.form != "manual" and placements is not None:
        specs = [s for g in gradients for s in jax.tree.leaves(placements.of(g).update)]
    sharding_axes = {a for spec in specs for a in spec_axes(spec)}
    axes = tuple(a for a in all_axes if a in sharding_axes)
    copies = [context.sharding.size(*(a for a in axes if a not in spec_axes(spec))) for spec in specs]
    weights = [is_counted / num for is_counted, num in zip(counted, copies, strict=True)]

    def of_device(leaves: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        bad, squares = _bad_and_squares(leaves, weights, platform)
        bad = lax.pmax(compat.as_varying(bad, all_axes), all_axes) if joins else compat.as_varying(bad, axes)
        squares = compat.as_varying(squares, axes)
        return (bad if joins or not axes else bad[None]), (squares[None] if axes else squares)

    of_parts = PartitionSpec(axes) if axes else PartitionSpec()
    outs = PartitionSpec() if joins else of_parts, of_parts
    checked: tuple[jax.Array, jax.Array] = jax.shard_map(of_device, mesh=mesh, in_specs=(specs,), out_specs=outs)(
        leaves
    )
    return checked


def _bad_and_squares(
    leaves: Sequence[jax.Array], weights: Sequence[float], platform: str | None
) -> tuple[jax.Array, jax.Array]:
    """Returns (int32[], 1 if a value is not finite; float32[], with a float64 leaf float64[], the weighted sum of the
    leaves' squares)."""
    sums = [sum_of_squares(x, platform) for x in leaves]
    wide = common_dtype(jnp.float32, *(x.dtype for x in sums))
    sums, zero = [x.astype(wide) for x in sums], jnp.zeros((), wide)
    finite = jnp.isfinite(functools.reduce(jnp.add, sums, zero))
    squares = functools.reduce(jnp.add, [w * x for w, x in zip(weights, sums, strict=True) if w], zero)
    return jnp.logical_not(finite).astype(jnp.int32), squares


def gradient_norm(mesh: Mesh, squares: jax.Array, num_groups: int) -> float:
    """Returns the norm of the gradient from the squares of a step; with several groups of replicas, the mean of their
    norms. Waits for the devices of `mesh`, and all processes call it: the parts are added by a separate program."""
    return float(_added(mesh, num_groups)(squares)) if squares.ndim else math.sqrt(float(squares))


@functools.cache
def _added(mesh: Mesh, num_groups: int) -> Any:
    norm: Callable[[jax.Array], jax.Array] = lambda x: jnp.sqrt(x.reshape(num_groups, -1).sum(1)).mean()
    return jax.jit(norm, out_shardings=NamedSharding(mesh, PartitionSpec()))


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
"""Reduction of arrays on CPU: number of parts added in the first loop (LLVM does not vectorize more); in later loops
(more than 15, so that XLA does not fuse both); the dim above which XLA reduces by windows, element by element; the
number of elements reduced directly, which keeps programs with many small leaves small."""

MAX_SQUARE = 1e28
"""Larger squares count as this: a sum of 3e10 of them is finite."""


def is_finite(x: jax.Array) -> jax.Array:
    """Returns bool[]: whether an array has no NaN and no infinity. Reads it once."""
    return jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.array(True)


@functools.partial(jax.jit, static_argnames="platform")  # traced once for all leaves of one shape
def sum_of_squares(x: jax.Array, platform: str | None = None) -> jax.Array:
    """Returns float32[], of a float64 array float64[]: the sum of the squares, or NaN if a value is not finite. Reads
    the array once.

    Args:
        platform: platform of the devices, if each holds the array or a local part of it; None if it may be sharded. On
            `cpu`, parts are added until few elements remain: XLA reduces an array element by element.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact) or not x.size:
        return jnp.zeros((), jnp.float32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        total: jax.Array = jnp.add(*(sum_of_squares(part, platform) for part in (x.real, x.imag)))
        return total
    wide = common_dtype(x.dtype, jnp.float32)

    def square(x: jax.Array) -> jax.Array:
        x = x.astype(wide)
        return jnp.minimum(x * x, MAX_SQUARE) + 0 * x

    if platform != "cpu" or x.size <= WINDOW:
        return square(x).sum()
    return _sum_by_parts(x, square, FIRST_PARTS)


def _sum_by_parts(x: jax.Array, function: Callable[[jax.Array], jax.Array], num: int) -> jax.Array:
    """Returns the sum of a function of the elements: adds `num` parts along the first long dim until few remain."""
    total: jax.Array
    if x.size <= FEW or max(x.shape) <= WINDOW:
        total = function(x).sum()
        return total
    axis = next((axis for axis, size in enumerate(x.shape) if size > WINDOW), 0)
    size, part_size = x.shape[axis], x.shape[axis] // num
    part: Callable[[int, int], jax.Array] = lambda start, stop: lax.slice_in_dim(x, start, stop, axis=axis)
    parts = [function(part(i * part_size, (i + 1) * part_size)) for i in range(num)]
    total = _sum_by_parts(functools.reduce(jnp.add, parts), lambda x: x, MAX_PARTS)
    rest = part(num * part_size, size)
    return total + _sum_by_parts(rest, function, num) if rest.size else total
