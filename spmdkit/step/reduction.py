"""Communication between replicas in a step: the config's reducer for gradients, an exact sum or maximum for everything
else. `sum` sends and adds gradients in `precision.reduction`.

Runs inside a `shard_map` that is manual over all mesh axes. With `sum`, XLA combines both into one all-reduce.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit import compat
from spmdkit.communication.reducers.base import METRIC_PREFIX, LeafState, Leaves, ReduceGroup, Reducer, ReducerMetrics
from spmdkit.foundation.trees import named_leaves
from spmdkit.step import rng, trace_context
from spmdkit.step.accumulator import Sums
from spmdkit.step.metrics.aggregates import Sum
from spmdkit.step.metrics.base import reduce_parts
from spmdkit.step.metrics.mean import Mean, Means
from spmdkit.step.trace_context import Context


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of `sk.value_and_grad`: the reducer's state (a tree like the gradient, or None) and the step's key."""

    reducer_state: Any = None
    key: jax.Array | None = None


def reduced(
    context: Context, sums: Sums, added: Any, axes: tuple[str, ...], call: Call | None, dims: Any = None
) -> tuple[Sums, Any, Any]:
    """Returns (sums over all replicas, `added` over all replicas, the reducer's new state) from one replica's values.

    Args:
        added: other values to sum: the model state.
        call: None in an evaluation.
        dims: for each gradient leaf, the dim along which ZeRO 2 scatters it over `fsdp`, or -1; None: no leaf.

    The reducer's metrics are added to the metrics of the sums; their names have the prefix `METRIC_PREFIX`.
    """
    with jax.named_scope(trace_context.REDUCE):
        reducer = context.options.reducer
        if call is None:
            sums, added = _exact(reducer, (sums, added), axes)
            return sums, added, None
        loss, metrics, new, added = _exact(reducer, (sums.loss, sums.metrics, sums.overwritten, added), axes)
        gradients = _scaled(context, reducer, sums, loss)
        (gradient, of_count), state, reported = _by_reducer(context, reducer, gradients, axes, call, dims)
        metrics |= {f"{METRIC_PREFIX}{name}": Sum(number) for name, number in reported.items()}
        sums = dataclasses.replace(sums, loss=loss, metrics=metrics, gradient=gradient, count_gradient=of_count)
        sums = dataclasses.replace(sums, overwritten=new)
        return sums, added, state


def _exact(reducer: Reducer, tree: Any, axes: tuple[str, ...]) -> Any:
    """Returns all values except gradients, over all replicas: sums are added, maxima use one more all-reduce, the rest
    is gathered."""
    return reduce_parts(
        tree,
        lambda sums: reducer.add(sums, axes),
        lambda maxima: lax.pmax(maxima, axes),
        lambda x: compat.all_gather_invarying(x[None], axes),
    )


def _scaled(context: Context, reducer: Reducer, own: Sums, loss: Mean | Means) -> tuple[Any, Any]:
    """Returns (gradient, gradient of the count or None) of one replica at the reducer's `input_scale`."""
    if reducer.input_scale == "weighted":
        assert own.facts is not None
        return own.mean_gradient(own.facts.with_static_counts(loss, "loss", context.num_losses)), None
    if reducer.input_scale == "mean":
        assert own.loss is not None
        return own.mean_gradient(own.loss), None
    return own.gradient, own.count_gradient


def _by_reducer(
    context: Context, reducer: Reducer, gradients: Any, axes: tuple[str, ...], call: Call, dims: Any
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """Returns (gradients over all replicas, the reducer's new state, its metrics)."""
    leaves, structure = jax.tree.flatten(gradients)
    kept = [x.dtype for x in leaves]
    if reducer.is_sum and context.sharding.size(*axes) > 1:
        leaves = [x.astype(context.options.reduction_dtype or x.dtype) for x in leaves]
    num = len(jax.tree.leaves(gradients[0]))
    states = _states_of(gradients, call.reducer_state)
    scattered = [-1] * len(leaves) if dims is None else list(jax.tree.leaves(dims)) * (len(leaves) // num)
    leaves = [x if dim < 0 else reduce_scatter(x, dim) for x, dim in zip(leaves, scattered, strict=True)]
    outer = tuple(a for a in axes if a != "fsdp")
    paths = [path for path, _ in named_leaves(gradients[0])] * (len(leaves) // num)
    metrics = dict[str, jax.Array]()
    for is_scattered, reduce_axes in ((False, axes), (True, outer)):
        chosen = [i for i, dim in enumerate(scattered) if (dim >= 0) == is_scattered]
        if chosen and reduce_axes:
            names = tuple(paths[i] for i in chosen)
            operands = [leaves[i] for i in chosen], [states[i] for i in chosen]
            totals, new_states, more = _apply(context, reducer, *operands, reduce_axes, call, names)
            metrics |= more
            for i, leaf, state in zip(chosen, totals, new_states, strict=True):
                leaves[i], states[i] = leaf, state
    new = None if call.reducer_state is None else jax.tree.unflatten(jax.tree.structure(gradients[0]), states[:num])
    return jax.tree.unflatten(structure, [x.astype(d) for x, d in zip(leaves, kept, strict=True)]), new, metrics


def _apply(
    context: Context,
    reducer: Reducer,
    leaves: Leaves,
    states: list[LeafState],
    axes: tuple[str, ...],
    call: Call,
    paths: tuple[str, ...],
) -> tuple[Leaves, list[LeafState], ReducerMetrics]:
    num = context.sharding.size(*axes)
    if num == 1:
        return lax.psum(leaves, axes), states, {}

    def key() -> jax.Array:
        if call.key is None:
            raise ValueError("a reducer that draws random numbers needs the step's key: sk.value_and_grad got None")
        return rng.reducer_key(call.key)

    group = ReduceGroup(axes, num, key, paths)
    if reducer.apply_with_metrics is not None:
        return reducer.apply_with_metrics(leaves, states, group)
    return *reducer.apply(leaves, states, group), {}


def _states_of(gradients: Any, reducer_state: Any) -> list[LeafState]:
    """Returns one mapping per leaf of (gradient, gradient of the count). The latter has no state."""
    nothing: list[LeafState] = [{} for _ in jax.tree.leaves(gradients)]
    if reducer_state is None:
        return nothing
    structure: Any = jax.tree.structure(gradients[0])
    return [*structure.flatten_up_to(reducer_state), *nothing[structure.num_leaves :]]


def reduce_scatter(x: jax.Array, dim: int) -> jax.Array:
    """Returns this device's shard along `dim` of the sum over `fsdp`.

    The scattered dim is moved to the second-to-last position. For any other position the TPU compiler (libtpu 0.0.42)
    sends an all_reduce, twice the bytes, and slices it (docs/collectives.md, `zero2`).

    Wire: (N-1)/N of x.
    """
    over_fsdp = functools.partial(lax.psum_scatter, axis_name="fsdp", tiled=True)
    scatter: Callable[[jax.Array, int], jax.Array] = lambda x, dim: over_fsdp(x, scatter_dimension=dim)
    if x.ndim == 1:
        return scatter(x, 0)
    if dim == x.ndim - 1:
        return jnp.swapaxes(scatter(jnp.swapaxes(x, dim - 1, dim), dim - 1), dim - 1, dim)
    part = scatter(x.reshape(*x.shape[: dim + 1], -1), dim)
    return part.reshape(*part.shape[: dim + 1], *x.shape[dim + 1 :])


SEAMS = {"reduced": reduced}
"""Functions that `verify` replaces to inject mistakes (verify/mutations.py)."""
