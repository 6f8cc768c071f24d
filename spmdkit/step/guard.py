"""The guard of a step: whether its loss, its gradient and its metrics are finite, as a code for each device, and what a step that is not leaves.

    code    0, or the sum of what is not finite, LOSS, GRADIENT, METRICS, and of SPIKE, a loss above the limit that the host has set
    stop    each device looks at its own part of the gradient, and the host joins the codes where it reads them: nothing is sent
    skip    the code is joined in the step, and a step that is not finite leaves everything but its number as it was
    rollback  joined too: every process knows at which step to go back

The gradient is what the optimizer is given, in the cut in which it updates (`state.apply_gradients`). A step that calls it inside of a loop,
branch or `jit` of its own, or never, is looked at by its new parameters, where a gradient that is not finite ends.

Wire: nothing, or one all-reduce of a scalar over all devices. Reads the gradient once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmdkit import compat
from spmdkit.mesh import REPLICA_AXES
from spmdkit.step import scope
from spmdkit.step.metric import is_metric
from spmdkit.step.state import TrainState

LOSS, GRADIENT, METRICS, SPIKE = 1, 2, 4, 8
KINDS = {"loss": LOSS, "gradient": GRADIENT, "metrics": METRICS, "spike": SPIKE}
"""What is looked at, as the config calls it -> its bit in a code."""


def guarded(
    context: scope.Context,
    old: TrainState,
    new: TrainState,
    metrics: Mapping[str, Any],
    gradients: Sequence[Any] | None,
    limit: jax.Array | None = None,
) -> tuple[TrainState, jax.Array | None]:
    """Returns (the state that the step leaves, its code): int32[]; where it is not joined and devices hold parts of the gradient, int32[parts].

    Args:
        gradients: what the optimizer was given, a tree for each call; None: look at the new parameters.
        limit: above which a loss is a spike.
    """
    code = code_of(context, new.params, metrics, gradients, limit)
    if code is not None and skips(context):
        with jax.named_scope(scope.GUARD):
            skip = is_skipped(context, code)
            kept = jax.tree.map(lambda a, b: jnp.where(skip, a, b), old, new)
        new = kept.replace(step=new.step, rng=new.rng)  # of all groups, and the same for ever
    return new, code


def skips(context: scope.Context) -> bool:
    """Returns whether a step may have to leave everything as it was."""
    return context.chosen.guard is not None and bool(context.chosen.guard.skips)


def is_skipped(context: scope.Context, code: jax.Array) -> jax.Array:
    """Returns bool[], whether a step of this code leaves everything as it was."""
    assert context.chosen.guard is not None
    return code & context.chosen.guard.skips != 0


def code_of(
    context: scope.Context,
    params: Any,
    metrics: Mapping[str, Any],
    gradients: Sequence[Any] | None,
    limit: jax.Array | None = None,
) -> jax.Array | None:
    """Returns the code of a step, as `guarded`; None where nobody looks."""
    asked = context.chosen.guard
    if asked is None:
        return None
    with jax.named_scope(scope.GUARD):
        code = jnp.int32(_of_metrics(asked, metrics))
        if limit is not None and "loss" in metrics:
            loss = metrics["loss"].value if is_metric(metrics["loss"]) else metrics["loss"]
            code = code | jnp.where(jnp.isfinite(loss) & (loss.astype(jnp.float32) > limit), SPIKE, 0)
        if asked.looks & GRADIENT:
            code = _with_gradients(context, code, [params] if gradients is None else gradients)
    return code


def _of_metrics(asked: scope.GuardSettings, metrics: Mapping[str, Any]) -> Any:
    """Returns the bits of the loss and the other metrics, which are the same on every device."""
    code: Any = 0
    for name, metric in metrics.items():
        bit = asked.looks & (LOSS if name == "loss" else METRICS)
        value = metric.value if is_metric(metric) else metric
        if bit and jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            code = code | jnp.where(jnp.isfinite(value).all(), 0, bit)
    return code


def _with_gradients(context: scope.Context, code: jax.Array, gradients: Sequence[Any]) -> jax.Array:
    """Returns the code with the gradient's bit: of this device's parts, or joined over all devices."""
    asked, placements = context.chosen.guard, context.cuts.placements
    assert asked is not None
    leaves = jax.tree.leaves(list(gradients))
    every = tuple(
        a for a in (context.cuts.mesh.axis_names if context.cuts.mesh is not None else ()) if context.cuts.size(a) > 1
    )
    if context.inside or not every:
        bad = _any_bad(leaves)
        # Of a gradient that is the same everywhere only axes of size one are left to add over, and nothing is sent.
        axes = REPLICA_AXES if asked.joins else tuple(compat.varying_axes(bad))
        return code | GRADIENT * (lax.pmax(compat.as_varying(bad, axes), axes) if context.inside and axes else bad)
    whole = [PartitionSpec()] * len(leaves)
    is_cut = context.cuts.form != "manual" and placements is not None
    specs = [s for g in gradients for s in jax.tree.leaves(placements.of(g).update)] if is_cut and placements else whole
    cutting = {a for spec in specs for dim in spec for a in ((dim,) if isinstance(dim, str) else dim or ())}
    axes = every if asked.joins else tuple(a for a in every if a in cutting)

    def of_device(leaves: Sequence[jax.Array], code: jax.Array) -> jax.Array:
        bad = _any_bad(leaves)
        bad = compat.as_varying(bad, axes)
        if asked.joins:
            return code | GRADIENT * lax.pmax(bad, axes)
        code = code | GRADIENT * bad
        return code[None] if axes else code

    out = PartitionSpec(axes) if axes and not asked.joins else PartitionSpec()
    mapped = jax.shard_map(of_device, mesh=context.cuts.mesh, in_specs=(specs, PartitionSpec()), out_specs=out)
    return mapped(leaves, code)


def _any_bad(leaves: Sequence[jax.Array]) -> jax.Array:
    return jnp.logical_not(functools.reduce(jnp.logical_and, map(is_finite, leaves), jnp.array(True))).astype(jnp.int32)


def is_finite(x: jax.Array) -> jax.Array:
    """Returns bool[], whether an array, or this device's part of one, holds no NaN and no infinity.

    Read once: the parts along the first dim are joined number by number before anything is reduced, since XLA's CPU backend writes out what a
    reduction is given (1.06 reads of a gradient of 4 MiB beside the optimizer, 1.5 with `isfinite(x).all()`; 0.25 against 0.6 ms alone). The
    largest magnitude would not do: there a maximum over floats is a kernel that loses a NaN on its way (jaxlib 0.10.2, 2026-11-23).
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact) or not x.size:
        return jnp.array(True)
    rows = x.shape[0] if x.ndim else 1
    num = next(n for n in (8, 4, 2, 1) if rows % n == 0)
    parts = jnp.split(x, num) if x.ndim else [x]
    return functools.reduce(jnp.logical_and, map(jnp.isfinite, parts)).all()
