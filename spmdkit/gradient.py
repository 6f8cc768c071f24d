"""`sk.value_and_grad`: the one place where gradients are computed and reduced, in the three ways to compile a step.

    g = sum_r sum_m d(sum_i w_i loss_i)/dp  /  sum_r sum_m sum_i w_i         (replicas r, microbatches m, examples i)

Every replica differentiates the *sum* of its own examples, adds its microbatches, and only then one reducer adds the
replicas: one reduction on the replica axes per step at any accumulation, none in the loop. The division comes last.

| form   | mesh                    | replicas                                       | the rest of the mesh                    |
| ------ | ----------------------- | ---------------------------------------------- | --------------------------------------- |
| manual | only replica axes > 1   | `shard_map`; parameters are typed varying      | nothing                                 |
| mapped | replica and model axes  | `vmap(spmd_axis_name=)`, then a fully manual   | the partitioner, from the layout        |
|        |                         | `shard_map` around the reducer alone           |                                         |
| plain  | no replica axis         | none                                           | the partitioner, from the layout        |

Two measured reasons for this shape (jax 0.10.2): differentiating with respect to a *replicated* parameter inside
`shard_map` already sums over the axis, silently, so parameters are cast to varying first; a `shard_map` that is manual
over some axes only aborts the process when a gather meets a sharded operand, so the mapped form never uses one.

Wire: reducer(parameters) on the replica axes once per step. ZeRO 1 and 2 count `fsdp` among them; ZeRO 2 sends a
reduce_scatter there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit import compat, reducers, scope
from spmdkit.errors import ConfigError
from spmdkit.means import Mean
from spmdkit.mesh import REPLICA_AXES
from spmdkit.tree import describe, first_difference

Loss = Callable[..., Any]
RESERVED_NAMES = ("step", "split", "examples_per_s", "step_time_s", "input_wait_s")


def value_and_grad(loss_fn: Loss) -> Callable[..., Any]:
    """Returns a function that computes the loss, its metrics and the gradient over the whole global batch.

    `sk.value_and_grad(loss_fn)(params, batch, key) -> ((loss, metrics), grads)`, or with model state
    `(params, model_state, batch, key) -> ((loss, metrics, new_model_state), grads)`. Right on every mesh, for any number
    of microbatches and in both dialects: in a global `train_step` it sees global arrays, in a per-replica one the
    replica's own; the result is the same, and already reduced.

    Raises:
        ConfigError: the loss does not return what `Task.loss_fn` must.
    """

    def run(params: Any, *args: Any) -> Any:
        step = scope.current_step()
        step.uses.add("value_and_grad")
        if len(args) not in (2, 3):
            raise ConfigError(
                f"sk.value_and_grad(loss_fn) was called with {1 + len(args)} arguments. It takes (params, batch, key), with model "
                "state (params, model_state, batch, key). The key is state.key."
            )
        model_state, batch, key = args if len(args) == 3 else (None, *args)
        _check_differentiable(params)
        local = _local_gradient(loss_fn, len(args) == 3, step, key)
        sums, new_state = map_replicas(step, local, params, model_state, batch, reduce_gradient=True)
        loss, metrics, grads = sums
        grads = jax.tree.map(lambda g: g / jnp.where(loss.count == 0, 1, loss.count).astype(g.dtype), grads)
        values = {name: metric.value for name, metric in metrics.items()}
        if len(args) == 3:
            return (loss.value, values, new_state), grads
        return (loss.value, values), grads

    return run


def evaluate(eval_fn: Loss, stateful: bool) -> Callable[..., dict[str, Mean]]:
    """Returns a function `(params, model_state, batch, key) -> {name: Mean}` over the whole global batch."""

    def run(params: Any, model_state: Any, batch: Any, key: Any) -> dict[str, Mean]:
        step = scope.current_step()

        def local(index: Any, params: Any, state: Any, rows: Any, mask: Any) -> Any:
            num = _num_rows(rows)
            with scope.over(scope.Examples(num, mask, _positions(step, index, 0, num), key)):
                metrics = eval_fn(
                    _cast(params, step.compute_dtype), *((state,) if stateful else ()), _cast(rows, step.compute_dtype)
                )
            return checked_metrics(metrics, "eval_fn"), None

        return map_replicas(step, local, params, model_state, batch, reduce_gradient=False)[0]

    return run


# ---- one replica ------------------------------------------------------------------------------------------------------


def _local_gradient(loss_fn: Loss, stateful: bool, step: scope.Step, key: Any) -> Callable[..., Any]:
    """Returns the function that one replica computes: sums over its own microbatches, no communication of ours."""

    def one_microbatch(params: Any, state: Any, rows: Any, mask: Any, index: Any, micro: Any) -> Any:
        num = _num_rows(rows)
        folded = None if key is None else jax.random.fold_in(jax.random.fold_in(key, index), micro)
        with scope.over(scope.Examples(num, mask, _positions(step, index, micro, num), key)):
            out = loss_fn(params, *((state,) if stateful else ()), _cast(rows, step.compute_dtype), folded)
        loss, metrics, new_state = checked_loss(out, stateful)
        if stateful and (difference := first_difference(state, new_state)):
            raise ConfigError(
                f"loss_fn returned another model state than it was given: {difference}. Its tree, shapes and dtypes stay the same "
                "over all steps. Return the whole new state, cast where needed."
            )
        return loss.sum, (loss, metrics, new_state)

    def local(index: Any, params: Any, state: Any, rows: Any, mask: Any) -> Any:
        body = one_microbatch
        if step.remat_whole:
            body = jax.checkpoint(body, policy=step.remat)
        differentiate = jax.value_and_grad(body, has_aux=True)
        computed = _cast(params, step.compute_dtype)

        def one(state: Any, rows: Any, mask: Any, micro: Any) -> Any:
            (_, (loss, metrics, new_state)), grads = differentiate(computed, state, rows, mask, index, micro)
            grads = jax.tree.map(lambda g, p: g.astype(step.reduce_dtype or p.dtype), grads, params)
            return (loss, metrics, _constrain_gradient(step, grads)), new_state

        if step.microbatches == 1:
            return one(state, rows, mask, 0)
        cut_rows, cut_mask = jax.tree.map(lambda x: _cut_microbatches(step, x), (rows, mask))

        def add(carry: Any, xs: Any) -> Any:
            total, state = carry
            sums, state = one(state, *xs)
            return _as_local(step, (jax.tree.map(jnp.add, total, sums), state)), None

        shapes = jax.eval_shape(one, state, *jax.tree.map(lambda x: x[0], (cut_rows, cut_mask)), 0)[0]
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        zeros = (zeros[0], zeros[1], _constrain_gradient(step, zeros[2]))
        micros = jnp.arange(step.microbatches, dtype=jnp.int32)
        return lax.scan(add, _as_local(step, (zeros, state)), (cut_rows, cut_mask, micros))[0]

    return local


def checked_loss(out: Any, stateful: bool) -> tuple[Mean, dict[str, Mean], Any]:
    """Returns (loss, metrics, model state) of what a loss returned.

    Raises:
        ConfigError: the loss is no `sk.mean`, or the metrics are no mapping of them.
    """
    form = "(sk.mean(...), {name: sk.mean(...)}, new_state)" if stateful else "sk.mean(...) or (sk.mean(...), metrics)"
    if stateful:
        if not isinstance(out, tuple) or isinstance(out, Mean) or len(out) != 3:
            raise ConfigError(f"loss_fn of a task with model state returned {_shape_of(out)}. It must return {form}.")
        loss, metrics, state = out
    else:
        loss, metrics, state = (*out, None) if isinstance(out, tuple) and len(out) == 2 else (out, {}, None)
    if isinstance(loss, tuple) and loss and isinstance(loss[0], Mean):
        raise ConfigError(
            f"loss_fn returned {_shape_of(loss)}. It must return {form}. Only a task whose init returns sk.Variables(params, state) "
            "returns a model state too. Drop the third value, or give init a state."
        )
    if not isinstance(loss, Mean):
        raise ConfigError(
            f"loss_fn returned {_shape_of(loss)} as its loss. It must return {form}: a plain number cannot be averaged over "
            "uneven replicas. Return sk.mean(per_example_loss)."
        )
    if jnp.ndim(loss.sum) != 0:
        raise ConfigError(f"loss_fn returned a sk.mean of shape {jnp.shape(loss.sum)}. A loss is one number.")
    if not isinstance(metrics, dict):
        raise ConfigError(f"loss_fn returned {_shape_of(metrics)} as its metrics. Give a dict {{name: sk.mean(...)}}.")
    if "loss" in metrics:
        raise ConfigError(
            "loss_fn returned a metric called 'loss', which is the name of its first value. Names are used once. Rename the metric."
        )
    return loss, checked_metrics(metrics, "loss_fn"), state


def checked_metrics(metrics: Any, who: str) -> dict[str, Mean]:
    """Returns `metrics` when it is a dict of means.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(metrics, dict):
        raise ConfigError(f"{who} returned {_shape_of(metrics)}. It must return a dict {{name: sk.mean(...)}}.")
    check_metric_names(metrics, who)
    for name, metric in metrics.items():
        if not isinstance(metric, Mean) or jnp.ndim(metric.sum) != 0:
            raise ConfigError(
                f"{who} returned metric '{name}' as {_shape_of(metric)}. A metric is a sk.mean, so that it adds over replicas "
                f"and steps. Write '{name}': sk.mean(...)."
            )
    if who == "eval_fn" and not metrics:
        raise ConfigError(
            "eval_fn returned an empty dict. An evaluation has at least one metric. Return {'loss': sk.mean(...)}."
        )
    return metrics


def check_metric_names(metrics: dict[Any, Any], who: str) -> None:
    """Raises ConfigError for a name that is no text, or that a line of metrics.jsonl needs for itself."""
    for name in metrics:
        if not isinstance(name, str) or name in RESERVED_NAMES:
            raise ConfigError(
                f"{who} returned a metric called {name!r}. A name is text other than {', '.join(RESERVED_NAMES)}, which metrics.jsonl "
                "uses itself. Rename it."
            )


def _shape_of(x: Any) -> str:
    if x is None:
        return "None"
    if isinstance(x, Mean):
        return f"a sk.mean of shape {jnp.shape(x.sum)}"
    if isinstance(x, tuple):
        return f"a tuple of {len(x)} ({', '.join(_shape_of(y) for y in x)})"
    return describe(x)


# ---- over all replicas ------------------------------------------------------------------------------------------------


def map_replicas(step: scope.Step, local: Loss, params: Any, state: Any, batch: Any, *, reduce_gradient: bool) -> Any:
    """Returns (sums over all replicas, model state) of `local(index, params, state, rows, mask) -> (sums, state)`.

    With `reduce_gradient` the last of the sums is a tree like the parameters, and leaves in the gradient's placement.
    """
    reducer = reducers.get(step.reducer)
    if step.inside:
        return _inside_replica(step, local, reducer, params, state, batch)
    run = {"plain": _plain, "mapped": _mapped, "manual": _manual}[step.form]
    num_replicas = step.size("replica", *step.data_axes)
    groups = step.state_groups
    if groups is not None:
        state = jax.tree.map(lambda x: jnp.repeat(x, num_replicas // groups, axis=0), state)
    sums, new_state = run(step, local, reducer, params, state, batch, reduce_gradient)
    if groups is not None and new_state is not None:
        new_state = jax.tree.map(lambda x: _group_mean(x, groups), new_state)
    return sums, new_state


def _plain(step: scope.Step, local: Loss, reducer: Any, params: Any, state: Any, batch: Any, _: bool) -> Any:
    if step.state_groups is not None:
        state = jax.tree.map(lambda x: x[0], state)
    sums, new_state = local(0, params, state, batch, step.mask)
    if step.state_groups is not None:
        new_state = jax.tree.map(lambda x: x[None], new_state)
    return sums, new_state


def _inside_replica(step: scope.Step, local: Loss, reducer: Any, params: Any, state: Any, batch: Any) -> Any:
    """One replica's part of the sum, called inside `shard_map`: every sum and the global model state in one reduction."""
    sums, new_state = local(lax.axis_index(REPLICA_AXES), *_as_local(step, (params, state, batch, step.mask)))
    if step.state_groups is None:
        sums, new_state = reducer(_as_local(step, (sums, new_state)), REPLICA_AXES)
        return sums, jax.tree.map(lambda x: _divide(x, step.size(*REPLICA_AXES)), new_state)
    return reducer(_as_local(step, sums), REPLICA_AXES), new_state


def _manual(step: scope.Step, local: Loss, reducer: Any, params: Any, state: Any, batch: Any, _: bool) -> Any:
    own_state = step.state_groups is not None
    rows = PartitionSpec(_non_trivial(step, REPLICA_AXES))

    def body(params: Any, state: Any, batch: Any, mask: Any) -> Any:
        inner = dataclasses.replace(step, mask=mask)
        if own_state:
            state = jax.tree.map(lambda x: x[0], state)
        sums, new_state = _inside_replica(inner, local, reducer, params, state, batch)
        if own_state:
            new_state = jax.tree.map(lambda x: x[None], _as_local(step, new_state))
        return sums, new_state

    states = rows if own_state else PartitionSpec()
    run = jax.shard_map(
        body,
        mesh=step.mesh,
        in_specs=(PartitionSpec(), states, rows, rows),
        out_specs=(PartitionSpec(), states),
    )
    return run(params, state, batch, step.mask)


def _mapped(
    step: scope.Step, local: Loss, reducer: Any, params: Any, state: Any, batch: Any, reduce_grads: bool
) -> Any:
    num_replica, num_data = step.size("replica"), step.size(*step.data_axes)
    own_state = step.state_groups is not None

    def by_replica(x: jax.Array) -> jax.Array:
        x = x.reshape(num_replica, num_data, -1, *x.shape[1:])
        return _constrain(step, x, ("replica",), step.data_axes, step.inner_axes)

    rows, mask = jax.tree.map(by_replica, (batch, step.mask))
    states = jax.tree.map(lambda x: x.reshape(num_replica, num_data, *x.shape[1:]), state) if own_state else state

    def one(state: Any, rows: Any, mask: Any) -> Any:
        index = lax.axis_index("replica") * num_data + lax.axis_index("data")
        return local(index, params, state, rows, mask)

    in_axes = (0 if own_state else None, 0, 0)
    over_data = jax.vmap(one, in_axes, axis_name="data", spmd_axis_name=step.data_axes)
    stacked = jax.vmap(over_data, in_axes, axis_name="replica", spmd_axis_name="replica")(states, rows, mask)
    sums, new_state = stacked
    if own_state:
        new_state = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), new_state)
        return _reduce_stacked(step, reducer, sums, reduce_grads), new_state
    sums, new_state = _reduce_stacked(step, reducer, (sums, new_state), reduce_grads)
    return sums, jax.tree.map(lambda x: _divide(x, num_replica * num_data), new_state)


def _reduce_stacked(step: scope.Step, reducer: Any, stacked: Any, reduce_grads: bool) -> Any:
    """Reduces leaves [replica, data, ...] over the replicas, each in its own placement, in a fully manual `shard_map`."""
    axes = tuple(a for a in ("replica", *step.data_axes) if step.size(a) > 1)
    if not axes:
        return jax.tree.map(lambda x: x[0, 0], stacked)
    whole = jax.tree.map(lambda _: PartitionSpec(), stacked)
    before, after = whole, whole
    if reduce_grads:
        assert step.placements is not None
        before = _with_gradient(whole, step.placements.compute)
        after = _with_gradient(whole, step.placements.gradient)
    stack = (_axes_or_none(step, ("replica",)), _axes_or_none(step, step.data_axes))

    def body(tree: Any) -> Any:
        tree = jax.tree.map(lambda x: x[0, 0], tree)
        if "fsdp" not in axes or before == after:
            return reducer(tree, axes)
        outer = tuple(a for a in axes if a != "fsdp")
        paired = jax.tree.map(lambda s, t: _scatter_dim(s, t), before, after)
        scattered = jax.tree.map(
            lambda x, dim: x if dim < 0 else lax.psum_scatter(x, "fsdp", scatter_dimension=dim, tiled=True),
            tree,
            paired,
        )
        cut = jax.tree.map(lambda x, dim: x if dim >= 0 else None, scattered, paired)
        kept = jax.tree.map(lambda x, dim: x if dim < 0 else None, scattered, paired)
        cut, kept = reducer(cut, outer) if outer else cut, reducer(kept, axes)
        return jax.tree.map(lambda dim, x, y: y if x is None else x, paired, cut, kept)

    run = jax.shard_map(
        body,
        mesh=step.mesh,
        in_specs=(jax.tree.map(lambda s: PartitionSpec(*stack, *s), before),),
        out_specs=after,
    )
    return run(stacked)


def _with_gradient(specs: Any, gradient: Any) -> Any:
    """Returns the spec tree of (sums, ...) with the gradient's own specs in the place of the last sum."""
    if isinstance(specs[0], tuple):
        (loss, metrics, _), *rest = specs
        return ((loss, metrics, gradient), *rest)
    loss, metrics, _ = specs
    return (loss, metrics, gradient)


def _scatter_dim(before: PartitionSpec, after: PartitionSpec) -> int:
    """Returns the dim that `after` cuts over fsdp and `before` does not, or -1."""
    for dim, axes in enumerate(after):
        names = (axes,) if isinstance(axes, str) else axes or ()
        if "fsdp" in names:
            return -1 if dim < len(before) and before[dim] == axes else dim
    return -1


# ---- small parts ------------------------------------------------------------------------------------------------------


def _positions(step: scope.Step, replica: Any, micro: Any, num: int) -> jax.Array:
    """Returns int32[num], the global positions of a microbatch's rows on one replica.

    Row s * (M b) + m * b + i of the global batch stands at position m * (S b) + s * b + i: each of the S shards of the batch
    holds its own part of every microbatch, so that cutting moves nothing and microbatch m is the same set of examples on
    every mesh. A replica's rows are those of its F inner shards.
    """
    inner = step.size(*step.inner_axes)
    shards = inner * step.size("replica", *step.data_axes)
    rows = num // inner
    base = micro * (shards * rows) + replica * num
    return (jnp.asarray(base, jnp.int32) + jnp.arange(num, dtype=jnp.int32)).astype(jnp.int32)


def whole_rows(step: scope.Step, examples: Any, mask: Any, key: Any, replica: Any = None) -> scope.Examples:
    """Returns the rows that a whole `train_step` sees: all of the global batch, or those of one replica.

    So that `sk.mean`, `sk.example_mask` and `sk.example_keys` are right in a step that does not use `sk.value_and_grad`.
    """
    num = _num_rows(examples)
    shards = step.size("replica", *step.data_axes, *step.inner_axes)
    own = shards if replica is None else step.size(*step.inner_axes)
    rows = num // (own * step.microbatches)
    shard, micro, row = jnp.unravel_index(jnp.arange(num, dtype=jnp.int32), (own, step.microbatches, rows))
    first = 0 if replica is None else replica * own
    return scope.Examples(num, mask, (micro * shards + first + shard) * rows + row, key)


def _cut_microbatches(step: scope.Step, x: jax.Array) -> jax.Array:
    """Returns [F M b, ...] as [M, F b, ...]; each inner shard keeps its own rows, so nothing moves."""
    inner = step.size(*step.inner_axes)
    x = x.reshape(inner, step.microbatches, -1, *x.shape[1:])
    x = jnp.moveaxis(x, 1, 0).reshape(step.microbatches, -1, *x.shape[3:])
    return _constrain(step, x, (), step.inner_axes)


def _constrain(step: scope.Step, x: jax.Array, *dims: tuple[str, ...]) -> jax.Array:
    if step.form == "manual" or step.mesh is None or not any(step.size(*axes) > 1 for axes in dims):
        return x
    spec = PartitionSpec(*(_axes_or_none(step, axes) for axes in dims))
    return lax.with_sharding_constraint(x, NamedSharding(step.mesh, spec))


def _constrain_gradient(step: scope.Step, grads: Any) -> Any:
    """Keeps a replica's gradient cut as its parameters are; the partitioner would else hold it whole while it adds."""
    mesh = step.mesh
    if step.form == "manual" or mesh is None or step.placements is None:
        return grads
    return jax.tree.map(
        lambda g, s: lax.with_sharding_constraint(g, NamedSharding(mesh, s)) if len(s) else g,
        grads,
        step.placements.compute,
    )


def _as_local(step: scope.Step, tree: Any) -> Any:
    """Types a tree as one replica's own inside `shard_map`; elsewhere there is nothing to type."""
    return compat.as_varying(tree, REPLICA_AXES) if step.form == "manual" else tree


def _axes_or_none(step: scope.Step, axes: tuple[str, ...]) -> Any:
    axes = tuple(a for a in axes if step.size(a) > 1)
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _non_trivial(step: scope.Step, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a in axes if step.size(a) > 1) or axes


def _cast(tree: Any, dtype: Any) -> Any:
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _divide(x: jax.Array, num: int) -> jax.Array:
    return x / num if jnp.issubdtype(x.dtype, jnp.inexact) else x // num


def _group_mean(x: jax.Array, groups: int) -> jax.Array:
    """Returns [groups, ...] from [replicas, ...]: the mean inside each group, in float32 or the leaf's own integers."""
    grouped = x.reshape(groups, -1, *x.shape[1:])
    return _divide(grouped.sum(1), grouped.shape[1])


def _num_rows(rows: Any) -> int:
    return int(np.shape(jax.tree.leaves(rows)[0])[0])


def _check_differentiable(params: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise ConfigError(
                f"parameter {jax.tree_util.keystr(path, simple=True, separator='/')} is {describe(leaf)}: only floating point "
                "leaves have a gradient. Keep it in the model state (sk.Variables) or out of the parameters."
            )
