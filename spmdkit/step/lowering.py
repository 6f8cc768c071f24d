"""Three ways to run a function on every replica and reduce the results: plain, mapped, manual. All compute the same
result.

| form   | mesh                   | replicas                                     | remaining mesh axes              |
| ------ | ---------------------- | -------------------------------------------- | -------------------------------- |
| manual | only replica axes > 1  | `shard_map`, untyped                         | nothing                          |
| mapped | replica and model axes | `vmap(spmd_axis_name=)`, then a fully manual | the partitioner, from the layout |
|        |                        | `shard_map` around the reducer only          |                                  |
| plain  | no replica axis        | none                                         | the partitioner, from the layout |

There are two measured reasons (jax 0.10.2). Differentiation with respect to an invariant value inside a typed
`shard_map` silently sums over the axis. So the manual form is untyped (`check_vma=False`), and `verify` compares its
replicas bitwise. A `shard_map` that is manual over only some axes aborts the process when a gather has a sharded
operand. So the mapped form never uses one.

Wire: reducer(sums) on the replica axes, once. ZeRO 1 and 2 include `fsdp` in these axes; ZeRO 2 sends a reduce_scatter
there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit import compat
from spmdkit.communication.reducers.base import inner_axes, shard_dim
from spmdkit.mesh.mesh import REPLICA_AXES, dim_axes, spec_axes
from spmdkit.step import reduction, trace_context
from spmdkit.step.accumulator import Sums
from spmdkit.step.model_state import agreement
from spmdkit.step.model_state.agreement import Kinds
from spmdkit.step.reduction import Call
from spmdkit.step.trace_context import Context

Local = Callable[..., Any]


def map_replicas(
    context: Context, local: Local, params: Any, state: Any, batch: Any, kinds: Kinds, call: Call | None
) -> Any:
    """Returns (`Sums` over all replicas, model state, the reducer's state). `local(index, params, state, rows, mask)`
    returns (`Sums`, model state) of one replica.

    Gradients have the gradient sharding. They are already divided if the reducer does not take sums. `kinds`: the
    reduction of each leaf of the model state; `call`: the call of `sk.value_and_grad`, None in an evaluation.
    """
    if context.inside:
        return _inside_replica(context, local, params, state, batch, kinds, call)
    run = {"plain": _plain, "mapped": _mapped, "manual": _manual}[context.sharding.form]
    groups, old = context.sharding.state_groups, state
    if groups is not None:
        state = jax.tree.map(lambda x: jnp.repeat(x, context.sharding.num_replicas // groups, axis=0), state)
    sums, new_state, reducer_state = run(context, local, params, state, batch, kinds, call)
    if groups is not None and new_state is not None:
        new_state = agreement.reduce_by_group(kinds, old, new_state, groups)
    return sums, new_state, reducer_state


def _plain(context: Context, local: Local, params: Any, state: Any, batch: Any, _: Kinds, call: Call | None) -> Any:
    own_state = context.sharding.state_groups is not None
    sums, new_state = local(0, params, _first(state) if own_state else state, batch, context.mask)
    return sums, _stacked(new_state) if own_state else new_state, None if call is None else call.reducer_state


def _inside_replica(
    context: Context, local: Local, params: Any, state: Any, batch: Any, kinds: Kinds, call: Call | None
) -> Any:
    """Runs one replica inside `shard_map`: one reduction of all sums and the global model state."""
    index = lax.axis_index(REPLICA_AXES)
    own_params, own_state, batch, mask = as_local(context, (params, state, batch, context.mask))
    sums, new_state = local(index, own_params, own_state, batch, mask)
    if context.sharding.state_groups is not None:
        sums, _, reducer_state = reduction.reduced(context, as_local(context, sums), {}, REPLICA_AXES, call)
        return sums, new_state, reducer_state
    added, largest = agreement.values_to_reduce(kinds, own_state, new_state, index == 0)
    sums, added = as_local(context, (sums, added))
    sums, added, reducer_state = reduction.reduced(context, sums, added, REPLICA_AXES, call)
    with jax.named_scope(trace_context.REDUCE):
        largest = lax.pmax(as_local(context, largest), REPLICA_AXES) if largest else largest
    num = context.sharding.size(*REPLICA_AXES)
    return sums, agreement.reduced_state(kinds, state, new_state, added, largest, num), reducer_state


def _manual(
    context: Context, local: Local, params: Any, state: Any, batch: Any, kinds: Kinds, call: Call | None
) -> Any:
    own_state = context.sharding.state_groups is not None
    rows = PartitionSpec(context.sharding.larger(REPLICA_AXES) or REPLICA_AXES)

    def body(params: Any, state: Any, batch: Any, mask: Any, reducer_state: Any) -> Any:
        inner, state = dataclasses.replace(context, mask=mask), _first(state) if own_state else state
        local_call = call and dataclasses.replace(call, reducer_state=_first(reducer_state))
        sums, new_state, reducer_state = _inside_replica(inner, local, params, state, batch, kinds, local_call)
        return sums, _stacked(new_state) if own_state else new_state, _stacked(reducer_state)

    states = rows if own_state else PartitionSpec()
    state_specs = rows if call is None else whole_state_specs(context, call.reducer_state)
    run = jax.shard_map(
        body,
        mesh=context.sharding.mesh,
        in_specs=(PartitionSpec(), states, rows, rows, state_specs),
        out_specs=(PartitionSpec(), states, state_specs),
        # With types, JAX sums the cotangents of invariant values over replicas: of the parameters, and of constants
        # that the loss differentiates with respect to. Without types each replica differentiates separately.
        check_vma=False,
    )
    return run(params, state, batch, context.mask, None if call is None else call.reducer_state)


def _mapped(
    context: Context, local: Local, params: Any, state: Any, batch: Any, kinds: Kinds, call: Call | None
) -> Any:
    compat.add_multi_axis_vmap_rules()
    num_replica, num_data = context.sharding.size("replica"), context.sharding.size(*context.sharding.data_axes)
    own_state = context.sharding.state_groups is not None

    def by_replica(x: jax.Array) -> jax.Array:
        x = x.reshape(num_replica, num_data, len(x) // (num_replica * num_data), *x.shape[1:])
        return constrain(context, x, ("replica",), context.sharding.data_axes, context.sharding.inner_axes)

    rows, mask = jax.tree.map(by_replica, (batch, context.mask))
    states = jax.tree.map(lambda x: x.reshape(num_replica, num_data, *x.shape[1:]), state) if own_state else state

    def replica_sums(state: Any, rows: Any, mask: Any) -> Any:
        index = lax.axis_index("replica") * num_data + lax.axis_index("data")
        return local(index, params, state, rows, mask)

    in_axes = (0 if own_state else None, 0, 0)
    # An enclosing `vmap` over groups of replicas names its own axes, which have size one here. Without such a `vmap`
    # all axes are named: if an axis of size one has no name, the TPU partitioner sends all_reduces instead of
    # reduce_scatters (libtpu 0.0.42, `hsdp` on v5e).
    alone = context.group[1] == 1
    all_axes = context.sharding.data_axes, ("replica",)
    data, replica = ((axes if alone else context.sharding.larger(axes)) or None for axes in all_axes)
    over_data = jax.vmap(replica_sums, in_axes, axis_name="data", spmd_axis_name=data)
    over_all = jax.vmap(over_data, in_axes, axis_name="replica", spmd_axis_name=replica)
    sums, new_state = over_all(states, rows, mask)
    if own_state:
        new_state = jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), new_state)
        sums, _, reducer_state = _reduce_stacked(context, sums, {}, call)
        return sums, new_state, reducer_state
    first = jnp.arange(num_replica * num_data).reshape(num_replica, num_data) == 0
    added, largest = agreement.values_to_reduce(kinds, state, new_state, first)
    sums, added, reducer_state = _reduce_stacked(context, sums, added, call)
    largest = {path: x.max((0, 1)) for path, x in largest.items()}
    return sums, agreement.reduced_state(kinds, state, new_state, added, largest, num_replica * num_data), reducer_state


def _reduce_stacked(context: Context, sums: Sums, added: Any, call: Call | None) -> Any:
    """Reduces leaves [replica, data, ...] over the replicas, each in its sharding, in a fully manual `shard_map`."""
    axes = context.sharding.larger(context.sharding.replica_axes)
    if not axes:
        sums, added = jax.tree.map(lambda x: x[0, 0], (sums, added))
        return sums, added, None if call is None else call.reducer_state
    before, after = _specs(context, sums, added, "compute"), _specs(context, sums, added, "gradient")
    stack = (_axes_or_none(context, ("replica",)), _axes_or_none(context, context.sharding.data_axes))
    dims = None
    if call is not None and "fsdp" in axes and before != after:
        dims = jax.tree.map(_scatter_dim, before[0].gradient, after[0].gradient)
    if not context.reducer_returns_sums:
        after = (dataclasses.replace(after[0], count_gradient=None), after[1])
    if call is not None:  # a prefix spec: a reducer may add metrics
        after = (dataclasses.replace(after[0], metrics=PartitionSpec()), after[1])
    reducer_state = None if call is None else call.reducer_state
    state_specs = None if reducer_state is None else _reducer_state_specs(context, after[0].gradient, reducer_state)

    def body(tree: Any, reducer_state: Any) -> Any:
        sums, added = jax.tree.map(lambda x: x[0, 0], tree)
        local_call = call and dataclasses.replace(call, reducer_state=_first(reducer_state))
        sums, added, reducer_state = reduction.reduced(context, sums, added, axes, local_call, dims)
        return (sums, added), _stacked(reducer_state)

    run = jax.shard_map(
        body,
        mesh=context.sharding.mesh,
        in_specs=(jax.tree.map(lambda s: PartitionSpec(*stack, *s), before), state_specs),
        out_specs=(after, state_specs),
    )
    (sums, added), reducer_state = run((sums, added), reducer_state)
    return sums, added, reducer_state


def _reducer_state_specs(context: Context, gradient: Any, reducer_state: Any) -> Any:
    """Returns the specs of a reducer's state: for each leaf its replica axes, then the spec of its gradient."""
    spec_of = lambda spec, x: reducer_state_spec(context, spec, x.shape[1:])
    of_leaf = lambda spec, state: jax.tree.map(functools.partial(spec_of, spec), state)
    return jax.tree.map(of_leaf, gradient, reducer_state)


def whole_state_specs(context: Context, reducer_state: Any) -> Any:
    """Returns the specs of a reducer's state for unsharded gradients: one spec for all leaves, or a tree of specs
    (per-shard states)."""
    if not context.options.reducer.per_shard_state:
        return PartitionSpec(context.sharding.larger(REPLICA_AXES) or REPLICA_AXES)
    return jax.tree.map(lambda x: reducer_state_spec(context, PartitionSpec(), x.shape[1:]), reducer_state)


def reducer_state_spec(context: Context, gradient: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    """Returns the spec of the reducer's state of a leaf, from the spec of its gradient."""
    axes = replica_axes_of(context, gradient)
    if (dim := shard_dim_of(context, gradient, shape)) is None:
        return PartitionSpec(axes or None, *gradient)
    dims = [dim_axes(of) for of in (*gradient, *[None] * (len(shape) - len(gradient)))]
    dims[dim] = (*dims[dim], *inner_axes(axes))
    return PartitionSpec(("replica",), *(of if len(of) > 1 else of[0] if of else None for of in dims))


def shard_dim_of(context: Context, gradient: PartitionSpec, shape: tuple[int, ...]) -> int | None:
    """Returns the dim along which the inner replica axes shard the state of a leaf, or None."""
    inner = inner_axes(replica_axes_of(context, gradient))
    if not context.options.reducer.per_shard_state or not inner:
        return None
    return shard_dim(part_shape(context, gradient, shape), context.sharding.size(*inner))


def part_shape(context: Context, spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of one device's shard of an array with this spec."""
    dims = [dim_axes(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
    return tuple(n // context.sharding.size(*axes) for n, axes in zip(shape, dims, strict=True))


def replica_axes_of(context: Context, gradient: PartitionSpec) -> tuple[str, ...]:
    """Returns the axes over which a leaf is reduced: replica axes larger than one that do not shard its gradient."""
    sharding_axes = spec_axes(gradient)
    return context.sharding.larger(a for a in context.sharding.replica_axes if a not in sharding_axes)


def _specs(context: Context, sums: Sums, added: Any, placement: Literal["compute", "gradient"]) -> Any:
    """Returns the spec of each leaf of (sums, added): gradients in their sharding, everything else replicated."""
    whole, added = jax.tree.map(lambda _: PartitionSpec(), (sums, added))
    if sums.gradient is None:
        return whole, added
    assert context.sharding.placements is not None
    specs = getattr(context.sharding.placements.of(jax.tree.map(lambda x: x[0, 0], sums.gradient)), placement)
    of_count = None if sums.count_gradient is None else specs
    return dataclasses.replace(whole, gradient=specs, count_gradient=of_count), added


def _scatter_dim(before: PartitionSpec, after: PartitionSpec) -> int:
    """Returns the dim that is sharded over fsdp in `after` but not in `before`, or -1."""
    for dim, axes in enumerate(after):
        names = dim_axes(axes)
        if "fsdp" in names:
            return -1 if dim < len(before) and before[dim] == axes else dim
    return -1


# ---- sharding constraints and types


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _stacked(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def constrain(context: Context, x: jax.Array, *dims: tuple[str, ...]) -> jax.Array:
    """Shards each dim over its axes that are larger than one."""
    if context.sharding.form == "manual" or context.sharding.mesh is None:
        return x
    if not any(context.sharding.size(*axes) > 1 for axes in dims):
        return x
    spec = PartitionSpec(*(_axes_or_none(context, axes) for axes in dims))
    return lax.with_sharding_constraint(x, NamedSharding(context.sharding.mesh, spec))  # type: ignore[no-any-return]


def as_local(context: Context, tree: Any) -> Any:
    """Types a tree as varying over replicas in a per-replica step; in other steps returns it unchanged."""
    return compat.as_varying(tree, REPLICA_AXES) if context.inside else tree


def _axes_or_none(context: Context, axes: tuple[str, ...]) -> Any:
    axes = context.sharding.larger(axes)
    return None if not axes else axes[0] if len(axes) == 1 else axes
