"""User code in JAX's explicit sharding mode (`jax.reshard`, `out_sharding=`, `jax.typeof(x).sharding`), inside a
program of which the mesh has automatic axes.

The code sees global arrays with the shardings of the layout and of the batch as their types. Its replicas are not
mapped: XLA's partitioner adds the reductions that the types imply.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from spmdkit.compat.user_mesh import mesh_in_context
from spmdkit.foundation.trees import named_leaves, path_name
from spmdkit.mesh.mesh import BATCH_AXES, REPLICA_AXES, canonical
from spmdkit.step import trace_context
from spmdkit.step.gradient import step_examples
from spmdkit.step.reducer_io import ReducerSlots
from spmdkit.step.state import TrainState
from spmdkit.step.trace_context import Context


def global_context(context: Context) -> Context:
    """Returns a context in which user code sees global arrays, and the replicas are not mapped."""
    sizes = {axis: 1 if axis in BATCH_AXES else size for axis, size in context.sharding.sizes.items()}
    return context.with_sharding(form="plain", sizes=sizes, inner_axes=context.sharding.larger(BATCH_AXES))


def explicit_contexts(context: Context) -> list[Context]:
    """Returns the contexts to try: rows over all axes of the batch, or over those that programs usually name."""
    choices = dict.fromkeys(map(context.sharding.larger, (BATCH_AXES, REPLICA_AXES, ("data",))))
    return [global_context(context).with_sharding(inner_axes=axes, explicit=True) for axes in choices]


def needs_explicit_axes(error: BaseException, names: Iterable[str] = ()) -> bool:
    """Returns whether JAX refused explicit shardings since the axes of the mesh are automatic. `names`: the user's
    names of axes, which only explicit shardings pass to JAX."""
    text = str(error)
    is_of_user = any(f"Resource axis: {name} " in text for name in names)
    if "can only refer to Auto axes" in text:  # a constraint on a mesh of the user with explicit axes
        return False
    return is_of_user or "AxisType.Auto" in text or "out_sharding" in text or "reshard" in text


def explicit_step(train_step: Callable[..., Any], shardings: TrainState) -> Callable[..., Any]:
    """Returns a step on arrays with explicit shardings: `shardings` of the state, and rows over the inner axes."""

    def step(state: TrainState, batch: Any) -> Any:
        context = trace_context.current()

        def traced(state: TrainState, batch: Any, mask: Any) -> Any:
            # With separate slots: a gradient that the guard would read has types here, and none outside.
            inner = dataclasses.replace(context, slots=ReducerSlots(), mask=mask)
            rows = step_examples(inner, batch, mask, state.key)
            with trace_context.tracing(inner), trace_context.with_examples(rows):
                return train_step(state, batch)

        return call_explicit(context, traced, shardings, state, batch, context.mask)

    return step


def call_explicit(
    context: Context, fn: Callable[..., Any], shardings: TrainState, state: TrainState, rows: Any, *more: Any
) -> Any:
    """Returns `fn(state, rows, *more)` in explicit mode. `more`: arrays with the rows as first dim, and scalars."""
    mesh, specs = context.sharding.mesh, dict(named_leaves(shardings))
    assert mesh is not None
    spec_of: Callable[[PartitionSpec], PartitionSpec] = functools.partial(trace_context.user_spec, context)
    of_state = jax.tree.map_with_path(lambda path, _: spec_of(specs[path_name(path)].spec), state)
    over_rows = spec_of(canonical([context.sharding.inner_axes], dict(mesh.shape)))
    of_others = jax.tree.map(lambda x: over_rows if x.ndim else PartitionSpec(), (rows, *more))
    with mesh_in_context(trace_context.user_mesh(context) or mesh):
        return jax.sharding.explicit_axes(fn, in_sharding=(of_state, *of_others))(state, rows, *more)
