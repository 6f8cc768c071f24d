"""The step of groups of replicas that train separately: nothing is sent along the sync's axes.

| mesh of one group | how                                                        |
| ----------------- | ---------------------------------------------------------- |
| one device        | `shard_map`, untyped (no result is typed as invariant)     |
| anything else     | `vmap(spmd_axis_name=)` over the groups, the step inside   |

Metrics are returned per group, [groups, ...]; a small separate program merges them where they are read
(`groups.merged_metrics`). Only a group with a non-finite step skips it; the other groups are not affected.

Wire: nothing over the sync's axes; over the others that of the step of one group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.step import trace_context
from spmdkit.step.finite_check import apply_guard
from spmdkit.step.gradient import step_examples
from spmdkit.step.groups.groups import GROUPED, Groups
from spmdkit.step.metrics.base import Metric, is_metric
from spmdkit.step.metrics.mean import Mean
from spmdkit.step.reducer_io import ReducerSlots
from spmdkit.step.state import FIELDS, TrainState
from spmdkit.step.step import COMPILED_NAME, Batch, StepFn, Stepped, checked, with_program_fields


def group_step(
    train_step: StepFn, context: trace_context.Context, groups: Groups, to_device: Callable[[Any], Any]
) -> Callable[[TrainState, Batch], Stepped]:
    """Returns the function to compile.

    Args:
        context: of one group: size one along the sync's axes.
        to_device: moves leaves from host memory to the devices.
    """

    def step_of_group(
        state: TrainState, examples: Any, mask: Any, index: Any
    ) -> tuple[TrainState, dict[str, Metric], Any]:
        slots = ReducerSlots(())
        own = dataclasses.replace(context, mask=mask, group=(index, groups.num), slots=slots)
        rows = step_examples(own, examples, mask, state.key)
        with trace_context.tracing(own), trace_context.with_examples(rows):
            new_state, metrics = checked(state, train_step(state, examples))
            new_state, metrics = with_program_fields(state, new_state, own), {**metrics, **slots.metrics}
            num = jnp.float32(rows.num) if mask is None else mask.sum(dtype=jnp.float32)
            new_state, code = apply_guard(own, state, new_state, metrics, slots.update_gradients)
            return new_state, {name: _group_metric(metric, num) for name, metric in metrics.items()}, code

    alone = all(size == 1 for size in context.sharding.sizes.values())
    spread = _by_device if alone else _by_vmap

    def whole_step(state: TrainState, batch: Batch) -> Stepped:
        state = to_device(state)
        new, metrics, code = spread(step_of_group, context, groups, state.replace(sync=None), batch)
        return new.replace(sync=state.sync), metrics, code

    whole_step.__name__ = COMPILED_NAME
    return whole_step


def _group_metric(metric: Any, num: jax.Array) -> Metric:
    """Returns a group's metric as arrays that merge; a plain number is weighted by the number of examples."""
    if not is_metric(metric):
        return Mean(jnp.asarray(metric, jnp.float32) * num, num)
    own: Metric = jax.tree.map(jnp.asarray, metric)
    return own


def _fields(state: TrainState, own: Any, shared: Any) -> TrainState:
    """Returns a state with `own` in each field that is stored per group, and `shared` in the others."""
    return state.replace(**{name: own if name in GROUPED else shared for name in FIELDS})


def _by_device(one: Any, context: trace_context.Context, groups: Groups, state: TrainState, batch: Batch) -> Any:
    own, whole = PartitionSpec(groups.axes), PartitionSpec()

    def body(state: TrainState, examples: Any, mask: Any) -> Any:
        mine = state.replace(**{f: jax.tree.map(lambda x: x[0], getattr(state, f)) for f in GROUPED})
        new, metrics, code = one(mine, examples, mask, lax.axis_index(groups.axes))
        stack = lambda tree: jax.tree.map(lambda x: x[None], tree)
        return new.replace(**{f: stack(getattr(new, f)) for f in GROUPED}), stack(metrics), stack(code)

    states = _fields(state, own, whole)
    mapped = jax.shard_map(
        body, mesh=context.sharding.mesh, in_specs=(states, own, own), out_specs=(states, own, own), check_vma=False
    )  # untyped: see lowering._manual
    return mapped(state, batch.examples, batch.mask)


def _by_vmap(one: Any, context: trace_context.Context, groups: Groups, state: TrainState, batch: Batch) -> Any:
    assert context.sharding.mesh is not None
    inner = tuple(
        a
        for a in ("replica", *context.sharding.data_axes, *context.sharding.inner_axes)
        if context.sharding.size(a) > 1
    )
    rows = NamedSharding(context.sharding.mesh, PartitionSpec(groups.axes, inner or None))

    def by_group(x: jax.Array) -> jax.Array:
        result: jax.Array = lax.with_sharding_constraint(x.reshape(groups.num, -1, *x.shape[1:]), rows)
        return result

    examples, mask = jax.tree.map(by_group, (batch.examples, batch.mask))
    states = _fields(state, 0, None)
    mapped = jax.vmap(one, in_axes=(states, 0, 0, 0), out_axes=(states, 0, 0), spmd_axis_name=groups.axes)
    return mapped(state, examples, mask, jnp.arange(groups.num, dtype=jnp.int32))
