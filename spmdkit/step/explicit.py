"""User code in JAX's explicit sharding mode (`jax.reshard`, `out_sharding=`, `jax.typeof(x).sharding`), inside a
program of which the mesh has automatic axes.

The code sees global arrays with the shardings of the layout and of the batch as their types. Its replicas are not
mapped: XLA's partitioner adds the reductions that the types imply.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from spmdkit.foundation.trees import named_leaves, path_name
from spmdkit.mesh.mesh import BATCH_AXES, REPLICA_AXES, canonical
from spmdkit.step import trace_context
from spmdkit.step.reducer_io import ReducerSlots
from spmdkit.step.state import TrainState
from spmdkit.step.trace_context import Context


def explicit_contexts(context: Context) -> list[Context]:
    """Returns the contexts to try: rows over all axes of the batch, or over those that programs usually name. The
    replicas are not mapped."""
    sizes = {axis: 1 if axis in BATCH_AXES else size for axis, size in context.sharding.sizes.items()}
    choices = dict.fromkeys(map(context.sharding.larger, (BATCH_AXES, REPLICA_AXES, ("data",))))
    return [context.with_sharding(form="plain", sizes=sizes, inner_axes=axes) for axes in choices]


def explicit_step(train_step: Callable[..., Any], shardings: TrainState) -> Callable[..., Any]:
    """Returns a step on arrays with explicit shardings: `shardings` of the state, and rows over the inner axes."""
    specs = dict(named_leaves(shardings))

    def step(state: TrainState, batch: Any) -> Any:
        context = trace_context.current()
        mesh = context.sharding.mesh
        assert mesh is not None
        own_slots = dataclasses.replace(context, slots=ReducerSlots())  # the guard checks the parameters instead

        def traced(state: TrainState, batch: Any) -> Any:
            with trace_context.tracing(own_slots):
                return train_step(state, batch)

        of_state = jax.tree.map_with_path(lambda path, _: specs[path_name(path)].spec, state)
        rows = canonical([context.sharding.inner_axes], dict(mesh.shape))
        of_batch = jax.tree.map(lambda _: rows, batch)
        return jax.sharding.explicit_axes(traced, in_sharding=(of_state, of_batch))(state, batch)

    return step
