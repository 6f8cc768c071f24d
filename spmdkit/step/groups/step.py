"""The step of replica groups that train separately: nothing is sent along the sync's axes.

| mesh of one group | how                                                        |
| ----------------- | ---------------------------------------------------------- |
| one device        | `shard_map`, untyped (no result is typed as invariant)     |
| anything else     | `vmap(spmd_axis_name=)` over the groups, the step inside   |

Metrics are returned per group, [groups, ...]. A separate program merges them (`groups.merged_metrics`).

Wire: nothing over the sync's axes; over the remaining axes, that of the step of one group.
"""

from __future__ import annotations

import dataclasses
import functools
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
from spmdkit.step.metrics.base import is_metric
from spmdkit.step.metrics.mean import Mean
from spmdkit.step.reducer_io import ReducerSlots
from spmdkit.step.state import FIELDS, TrainState
from spmdkit.step.step import COMPILED_NAME, Batch, StepChecks, StepFn, Stepped, checked, with_program_fields
from spmdkit.step.trace_context import Context


def group_step(
    train_step: StepFn, context: Context, groups: Groups, to_device: Callable[[Any], Any]
) -> Callable[[TrainState, Batch], Stepped]:
    """Returns the function to compile. `context` is the context of one group: the sync's axes have size one."""

    def step_of_group(state: TrainState, examples: Any, mask: Any, index: Any) -> Stepped:
        slots = ReducerSlots(())
        group_context = dataclasses.replace(context, mask=mask, group=(index, groups.num), slots=slots)
        rows = step_examples(group_context, examples, mask, state.key)
        with trace_context.tracing(group_context), trace_context.with_examples(rows):
            new_state, metrics = checked(state, train_step(state, examples))
            new_state, metrics = with_program_fields(state, new_state, group_context), {**metrics, **slots.metrics}
            num = jnp.float32(rows.num) if mask is None else mask.sum(dtype=jnp.float32)
            new_state, code, squares = apply_guard(group_context, state, new_state, metrics, slots)
            group_metrics = {name: _group_metric(metric, num) for name, metric in metrics.items()}
            return new_state, group_metrics, StepChecks(code, slots.sizes, squares=squares)

    is_one_device = all(size == 1 for size in context.sharding.sizes.values())
    spread = _by_device if is_one_device else _by_vmap

    def whole_step(state: TrainState, batch: Batch) -> Stepped:
        state = to_device(state)
        new, metrics, checks = spread(step_of_group, context, groups, state.replace(sync=None), batch)
        return new.replace(sync=state.sync), metrics, checks

    whole_step.__name__ = COMPILED_NAME
    return whole_step


def _group_metric(metric: Any, num: jax.Array) -> Any:
    """Returns a group's metric as arrays that merge. A plain number is weighted by the number of examples."""
    if is_metric(metric):
        return jax.tree.map(jnp.asarray, metric)
    return Mean(jnp.asarray(metric, jnp.float32) * num, num)


def _fields(state: TrainState, own: Any, shared: Any) -> TrainState:
    """Returns a state with `own` in each per-group field and `shared` in all other fields."""
    return state.replace(**{name: own if name in GROUPED else shared for name in FIELDS})


def _by_device(one: Any, context: Context, groups: Groups, state: TrainState, batch: Batch) -> Any:
    spec, replicated = PartitionSpec(groups.axes), PartitionSpec()

    def body(state: TrainState, examples: Any, mask: Any) -> Any:
        local_state = state.replace(**{f: jax.tree.map(lambda x: x[0], getattr(state, f)) for f in GROUPED})
        new, metrics, checks = one(local_state, examples, mask, lax.axis_index(groups.axes))
        stack: Callable[[Any], Any] = lambda tree: jax.tree.map(lambda x: x[None], tree)
        return new.replace(**{f: stack(getattr(new, f)) for f in GROUPED}), stack(metrics), stack(checks)

    states = _fields(state, spec, replicated)
    mapped = jax.shard_map(
        body, mesh=context.sharding.mesh, in_specs=(states, spec, spec), out_specs=(states, spec, spec), check_vma=False
    )  # untyped: see lowering._manual
    return mapped(state, batch.examples, batch.mask)


def _by_vmap(one: Any, context: Context, groups: Groups, state: TrainState, batch: Batch) -> Any:
    assert context.sharding.mesh is not None
    inner = context.sharding.larger((*context.sharding.replica_axes, *context.sharding.inner_axes))
    rows = NamedSharding(context.sharding.mesh, PartitionSpec(groups.axes, inner or None))

    def by_group(x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x.reshape(groups.num, len(x) // groups.num, *x.shape[1:]), rows)  # type: ignore[no-any-return]

    examples, mask = jax.tree.map(by_group, (batch.examples, batch.mask))
    states = _fields(state, 0, None)
    mapped = jax.vmap(one, in_axes=(states, 0, 0, 0), out_axes=(states, 0, 0), spmd_axis_name=groups.axes)
    return mapped(state, examples, mask, jnp.arange(groups.num, dtype=jnp.int32))


def synchronous_step(
    whole: Callable[[TrainState, Batch], Stepped], groups: Groups, single: TrainState, checks: Any
) -> Callable[[TrainState, Batch], Stepped]:
    """Returns the function to compile for a synchronous step of all replicas, before groups train separately.

    Each device uses its shard of its group's copy as the global state and returns the new state in the same way, so no
    data are sent. The copies are equal at the start and after each such step.

    Args:
        whole: the step of the full mesh. Its input and output states have one copy and are on the devices.
        single: the abstract state of one copy, with its shardings.
        checks: the abstract checks of a step of groups.

    Wire: that of the step of the full mesh.
    """
    fields = {name: getattr(single, name) for name in GROUPED}
    mesh = jax.tree.leaves(single.params)[0].sharding.mesh
    specs = jax.tree.map(lambda x: x.sharding.spec, fields)
    stacked = jax.tree.map(lambda x: PartitionSpec(groups.axes, *x.sharding.spec), fields)
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)  # equal copies, but typed as varying
    local_copy = mapped(lambda tree: jax.tree.map(lambda x: x[0], tree), in_specs=(stacked,), out_specs=specs)
    group_copies = mapped(lambda tree: jax.tree.map(lambda x: x[None], tree), in_specs=(specs,), out_specs=stacked)

    def for_groups(of_step: jax.Array, of_groups: Any) -> jax.Array:
        spec = PartitionSpec(groups.axes, *[PartitionSpec.UNCONSTRAINED] * (of_groups.ndim - 1))
        copies = jnp.broadcast_to(of_step, of_groups.shape)
        return lax.with_sharding_constraint(copies, NamedSharding(mesh, spec))  # type: ignore[no-any-return]

    def train_step(state: TrainState, batch: Batch) -> Stepped:
        copy = local_copy({name: getattr(state, name) for name in GROUPED})
        new, metrics, of_step = whole(state.replace(**copy, sync=None), batch)
        sync_state = groups.sync.init(groups.sent(new.params))  # the sync's state after the last synchronous step
        new = new.replace(**group_copies({name: getattr(new, name) for name in GROUPED}), sync=sync_state)
        return new, metrics, jax.tree.map(for_groups, of_step, checks)

    return train_step
