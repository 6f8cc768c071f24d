"""The cotangents of a loss that is a mean, or a sum of means with different counts.

    g = sum_k d/dp (S_k / C_k) = sum_r sum_m sum_k [ dS_krm/dp / C_k  -  S_k / C_k^2 dC_krm/dp ]     (means k, replicas
    r, microbatches m)

One pull-back with 1 / C_k suffices if every C_k is known in advance, over all replicas and microbatches. This holds for
counts that depend only on shapes. Other counts are added over replicas first. With microbatches a separate pass before
the gradient computes them; all but the counts (and S_k, if counts depend on the parameters) is dead code there.

A single mean with a count that is not known in advance is pulled back with 1, and divided after the reduction. This is
the same gradient only if every backward rule is linear in its cotangent and no cotangent leaves the range of its dtype.
So a loss with a `custom_vjp` (clipped, normalized or quantized cotangents), float16 or float8 adds its count first.

Wire: one all-reduce of a few numbers if a count is added first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmdkit import compat
from spmdkit.mesh.mesh import REPLICA_AXES
from spmdkit.step import trace_context
from spmdkit.step.dataflow.cotangent import has_small_range
from spmdkit.step.lowering import as_local
from spmdkit.step.metrics.mean import Mean, Means
from spmdkit.step.trace_context import Context


def terms(loss: Mean | Means) -> Means:
    """Returns the loss as a sum of means."""
    return loss if isinstance(loss, Means) else Means((loss,))


def divides_first(context: Context, loss: Mean | Means, needs_scale: Callable[[], bool]) -> bool:
    """Returns whether the loss is pulled back with 1 / count of the full batch, not divided after the reduction.

    `needs_scale` returns whether the gradient of one microbatch's loss depends on the scale of its cotangent.
    """
    if isinstance(loss, Means) or isinstance(loss.count, np.floating):
        return True
    reduced = context.options.reduction_dtype
    return (reduced is not None and has_small_range(reduced)) or needs_scale()


def has_known_counts(loss: Means) -> bool:
    """Returns whether all counts depend only on shapes."""
    return all(isinstance(part.count, np.floating) for part in loss.parts)


def _over_equal_microbatches(context: Context, loss: Means) -> Means:
    """Returns the sum of means over all microbatches and replicas, with the counts of one microbatch, without sums."""
    times = context.sharding.microbatches
    static: Callable[[Any], Any] = lambda x: x.dtype.type(float(x) * times) if isinstance(x, np.floating) else None
    parts = (Mean(jnp.zeros_like(part.sum), static(part.count), static(part.num)) for part in loss.parts)
    return over_replicas(context, Means(tuple(parts)), False)


def over_replicas(context: Context, loss: Means, with_sums: bool) -> Means:
    """Returns the sum of means over all replicas from one replica's part. Without sums, the sums are zero.

    With a reducer that takes the mean of each replica (`input_scale="mean"`) the counts are those of the replica.
    """
    if context.options.reducer.input_scale == "mean":
        return loss
    axes = REPLICA_AXES if context.inside or context.sharding.form != "plain" else ()
    if not has_known_counts(loss):
        context.usage.record_call("count_first")
    num = context.sharding.size(*REPLICA_AXES) if context.inside else context.sharding.num_replicas

    def added(x: Any) -> Any:
        if isinstance(x, np.floating):
            return x.dtype.type(float(x) * num)
        return lax.psum(x, axes) if axes else x

    def part(mean: Mean) -> Mean:
        num_elements = None if mean.num is None else added(mean.num)
        return Mean(added(mean.sum) if with_sums else jnp.zeros_like(mean.sum), added(mean.count), num_elements)

    with jax.named_scope(trace_context.REDUCE):
        return Means(tuple(part(mean) for mean in loss.parts))


def over_microbatches(
    context: Context, of_one: Means, compute: Callable[[Any, Any], Any], state: Any, microbatches: Any, depends: bool
) -> Means:
    """Returns the sum of means over all microbatches and replicas, before any microbatch is differentiated.

    Args:
        of_one: the abstract loss of one microbatch; not all of its counts are known.
        compute: `(state, microbatch) -> (loss, metrics, new state)`; `microbatches` is a tree of [microbatches, ...].
        depends: whether a count depends on the parameters.
    """

    def add(carry: Any, xs: Any) -> Any:
        total, state = carry
        loss, _, new_state = compute(state, xs)
        reduced_part: Callable[[Mean], Mean] = lambda part: (
            part if depends else dataclasses.replace(part, sum=jnp.zeros_like(part.sum))
        )
        loss = Means(tuple(reduced_part(part) for part in terms(loss).parts))
        return as_local(context, (total.merge(loss), new_state)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), of_one)
    (total, _), _ = lax.scan(add, as_local(context, (zeros, state)), microbatches)
    return over_replicas(context, total, depends)


def microbatch_gradients(
    context: Context,
    loss: Mean | Means,
    first: bool,
    whole: Means | None,
    primals: Any,
    pull: Callable[[Any], Any],
    depends: bool,
) -> tuple[Any, Any]:
    """Returns (gradient of the sum, gradient of the count or None) of one microbatch; with `first` (`divides_first`),
    (gradient of the value, None).

    Args:
        whole: the sum of means over the full batch; None if this microbatch is the only one, or all counts are known.
        primals: (sums, counts), tuples with one entry per mean.
        pull: maps cotangents shaped like `primals` to the gradient, in a tuple.
        depends: whether a count depends on the parameters.
    """
    if first:
        if whole is None:
            known, means = has_known_counts(terms(loss)), terms(loss)
            whole = _over_equal_microbatches(context, means) if known else over_replicas(context, means, depends)
        return pull(_cotangents(whole, primals, depends))[0], None
    ones, zeros = (jax.tree.map(fill, primals) for fill in (jnp.ones_like, jnp.zeros_like))
    of_sum = pull((ones[0], zeros[1]))[0]
    return of_sum, pull((zeros[0], ones[1]))[0] if depends else None


def _cotangents(whole: Means, primals: Any, depends: bool) -> Any:
    """Returns the cotangents of the sums and counts of one microbatch: their weights in the total sum of means."""
    (totals, counted), scales = primals, [1 / part.divisor for part in whole.parts]
    # In a per-replica step, totals are typed invariant and the sums of a replica varying.
    like: Callable[[Any, Any], Any] = lambda value, x: compat.as_varying(
        value.astype(jnp.result_type(x)), tuple(compat.varying_axes(x))
    )
    of_sums = tuple(like(s, x) for s, x in zip(scales, totals, strict=True))
    if not depends:
        return of_sums, jax.tree.map(jnp.zeros_like, counted)
    ratios = [-part.value * s for part, s in zip(whole.parts, scales, strict=True)]
    return of_sums, tuple(like(r, c) for r, c in zip(ratios, counted, strict=True))


SEAMS = {"of_all": over_replicas, "shares": _cotangents}
"""Functions that `verify` replaces to inject mistakes (verify/mutations.py)."""
