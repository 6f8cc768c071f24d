"""`sk.value_and_grad`: computes and reduces all gradients, in each of the three lowerings of a step.

    g = sum_r sum_m d(sum_i w_i loss_i)/dp  /  sum_r sum_m sum_i w_i         (replicas r, microbatches m, examples i)

Every replica differentiates its part of the mean, with 1 / count of the full batch as the cotangent of its sum, and
accumulates its microbatches. One reducer then adds the replicas, once per step, outside of the loop over microbatches.
If the count is not known in advance, the division is last (multi_term_loss.py). Lowerings: lowering.py.

Wire: reducer(parameters) on the replica axes, once per step.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmdkit.errors import ConfigError
from spmdkit.foundation import jaxprs
from spmdkit.foundation.trees import abstract, describe, first_difference, is_narrow, named_leaves, path_name
from spmdkit.mesh.mesh import REPLICA_AXES
from spmdkit.step import leaf_roles, rng, trace_context
from spmdkit.step.accumulator import LossFacts, Sums
from spmdkit.step.checks.return_values import checked_loss, checked_metrics
from spmdkit.step.dataflow.analysis import ANALYZED_REPLICAS, Inputs, Usage, analyze
from spmdkit.step.dataflow.cotangent import needs_scale
from spmdkit.step.lowering import as_local, constrain, map_replicas
from spmdkit.step.metrics.aggregates import Bincount, Derived, Max
from spmdkit.step.metrics.base import Metric, empty_parts, merge_trees
from spmdkit.step.metrics.mean import Means
from spmdkit.step.metrics.user_metric import CustomMetric
from spmdkit.step.model_state import agreement
from spmdkit.step.multi_term_loss import (
    divides_first,
    has_known_counts,
    microbatch_gradients,
    over_microbatches,
    terms,
)
from spmdkit.step.reduction import Call
from spmdkit.step.row_order import RowOrder, split
from spmdkit.step.trace_context import Context

Loss = Callable[..., Any]


def value_and_grad(loss_fn: Loss) -> Callable[..., Any]:
    """Returns a function that computes the loss, its metrics and the gradient over the full global batch.

    `sk.value_and_grad(loss_fn)(params, batch, key) -> ((loss, metrics), grads)`, or with model state `(params,
    model_state, batch, key) -> ((loss, metrics, new_model_state), grads)`. The result is correct on every mesh, for any
    number of microbatches, and already reduced over replicas. A global `train_step` passes global arrays; a per-replica
    one passes the rows of its replica. Metrics are numbers; array metrics (`sk.bincount`) are returned as metrics with
    `.value`, and a step can return them.

    Raises:
        ConfigError: the loss does not return the values that `Task.loss_fn` must return.
    """
    compute = means_and_grad(loss_fn)

    def value_and_gradient(params: Any, *args: Any) -> Any:
        (loss, metrics, *new_state), grads = compute(params, *args)
        numbers = {name: _number(m) for name, m in metrics.items()}
        return (loss.value, numbers, *new_state), grads

    return value_and_gradient


def _number(metric: Metric) -> Any:
    """Returns the value of a scalar metric; other metrics are returned unchanged."""
    if isinstance(metric, Bincount) or (isinstance(metric, Derived | CustomMetric) and jnp.ndim(metric.value)):
        return metric
    return metric.value


def means_and_grad(loss_fn: Loss) -> Callable[..., Any]:
    """Returns the function of `value_and_grad` with the loss as (sum, count) and its metrics as `Metric`."""

    def means_and_gradient(params: Any, *args: Any) -> Any:
        context = trace_context.current()
        context.usage.record_call("value_and_grad")
        if len(args) not in (2, 3):
            raise ConfigError(
                f"sk.value_and_grad(loss_fn) was called with {1 + len(args)} arguments. It takes (params, batch, "
                "key), with model state (params, model_state, batch, key). The key is state.key."
            )
        model_state, batch, key = args if len(args) == 3 else (None, *args)
        roles = leaf_roles.roles_in(context, params)
        leaf_roles.check_overwritten(roles, params)
        _check_differentiable(params, roles)
        usages = _analysis(loss_fn, len(args) == 3, context, params, model_state, batch, key)
        kinds = _state_reductions(context, model_state, usages) if len(args) == 3 else {}
        local = _local_gradient(loss_fn, len(args) == 3, context, key, usages)
        trained = leaf_roles.select(params, lambda path: path not in roles)
        context.usage.gradients.append(_gradient_shapes(context, trained))
        call = Call(context.slots.take(), key)
        sums, new_state, reducer_state = map_replicas(context, local, params, model_state, batch, kinds, call)
        context.slots.put(reducer_state)
        facts = sums.facts
        total: Callable[[Any, str], Any] = lambda metric, name: facts.with_static_counts(
            metric, name, context.num_losses
        )
        loss = total(sums.loss, "loss")
        context.slots.add_metrics({name: m.value for name, m in sums.metrics.items() if name not in facts.names})
        metrics = {name: total(m, name) for name, m in sums.metrics.items() if name in facts.names}
        grads = sums.mean_gradient(loss) if context.reducer_returns_sums else sums.gradient
        if roles:
            new_values = {path: largest.value for path, largest in sums.overwritten.items()}
            others = lambda path, p: new_values.get(path_name(path), jnp.zeros(p.shape, p.dtype))
            grads = leaf_roles.fill(grads, jax.tree.map_with_path(others, params))
        return (loss, metrics, new_state)[: len(args)], grads

    return means_and_gradient


def evaluate(eval_fn: Loss, stateful: bool) -> Callable[..., dict[str, Metric]]:
    """Returns a function `(params, model_state, batch, key, number) -> {name: metric}` over the full global batch.

    If `key` is given, `eval_fn` receives a key as its last argument that differs by batch (`number`) and replica.
    """

    def evaluated(params: Any, model_state: Any, batch: Any, key: Any = None, number: Any = 0) -> dict[str, Metric]:
        context = trace_context.current()
        replicas = context.sharding.num_replicas

        def local(index: Any, params: Any, state: Any, rows: Any, mask: Any) -> Any:
            num = _num_rows(rows)
            positions = _positions(context, index, 0, num) + number * (num * replicas)
            with trace_context.with_examples(trace_context.Examples(num, mask, positions, key)):
                metrics = eval_fn(
                    _cast_params(context, params),
                    *((state,) if stateful else ()),
                    _cast_inputs(context, rows),
                    *(() if key is None else (_loss_key(rng.batch_key(key, number), index, 0),)),
                )
            return Sums(None, checked_metrics(metrics, "eval_fn")), None

        found: dict[str, Metric] = map_replicas(context, local, params, model_state, batch, {}, None)[0].metrics
        return found

    return evaluated


# ---- one replica


def _microbatch_loss(loss_fn: Loss, stateful: bool, context: Context, key: Any) -> Callable[..., Any]:
    """Returns the function of one microbatch: (loss, metrics, new model state, facts)."""

    def one_microbatch(params: Any, state: Any, rows: Any, mask: Any, index: Any, micro: Any) -> Any:
        num = _num_rows(rows)
        group, _ = context.group
        folded = _loss_key(key, group * context.sharding.num_replicas + index, micro)
        positions = _positions(context, index, micro, num)
        with trace_context.with_examples(trace_context.Examples(num, mask, positions, key)):
            out = loss_fn(params, *((state,) if stateful else ()), _cast_inputs(context, rows), folded)
        loss, metrics, new_state = checked_loss(out, stateful)
        new_state = _checked_state(state, new_state) if stateful else None
        return loss, metrics, new_state, LossFacts.of({**metrics, "loss": loss})

    return one_microbatch


def _needs_scale(usages: Sequence[Usage], loss_of: Callable[[Any], Any], params: Any) -> bool:
    """Returns whether a gradient depends on the scale of the cotangent, by the analysis of the loss if there is one."""
    return usages[0].needs_scale if usages else needs_scale(jax.make_jaxpr(lambda part: loss_of(part)[0])(params))


def _local_gradient(
    loss_fn: Loss, stateful: bool, context: Context, key: Any, usages: Sequence[Usage]
) -> Callable[..., Any]:
    """Returns the function of one replica: sums over its microbatches, without communication."""
    one_microbatch = _microbatch_loss(loss_fn, stateful, context, key)

    def local(index: Any, params: Any, state: Any, rows: Any, mask: Any) -> Any:
        options, roles = context.options, leaf_roles.roles_in(context, params)
        computed = _cast_params(context, params)
        by_path: Callable[[Any], Callable[[str], bool]] = lambda keep: lambda path: keep(roles.get(path))
        select: Callable[[Any, Any], Any] = lambda tree, keep: leaf_roles.select(tree, by_path(keep))
        moving = select(computed, lambda role: role != "frozen") if roles else computed
        overwrites = "overwritten" in roles.values()

        def sum_and_count(*args: Any) -> Any:
            loss, *rest = one_microbatch(*args)
            parts = [(part.sum, part.count) for part in terms(loss).parts]
            return tuple(zip(*parts, strict=True)), (loss, *rest)

        body = jax.checkpoint(sum_and_count, policy=options.remat.of_block) if options.remat_whole else sum_and_count

        def microbatch_sums(state: Any, rows: Any, mask: Any, micro: Any, whole: Means | None = None) -> Any:
            whole_params: Callable[[Any], Any] = lambda part: leaf_roles.fill(part, computed) if roles else part
            loss_of: Callable[[Any], Any] = lambda part: body(whole_params(part), state, rows, mask, index, micro)
            primals, pull, (loss, metrics, new_state, facts), depends = _vjp(loss_of, moving)
            divided = whole is not None or overwrites
            divided = divided or divides_first(context, loss, lambda: _needs_scale(usages, loss_of, moving))
            parts: Any = microbatch_gradients(context, loss, divided, whole, primals, pull, depends)
            new_values = dict[str, Max]()
            if roles:
                leaves = named_leaves(select(parts[0], lambda role: role == "overwritten"))
                new_values = {path: Max(x, jnp.isnan(x).astype(x.dtype)) for path, x in leaves}
                parts = tuple(None if tree is None else select(tree, lambda role: role is None) for tree in parts)
            grads, of_count = (None if tree is None else _in_gradient_dtype(context, tree, params) for tree in parts)
            facts = dataclasses.replace(facts, count_has_gradient=depends, divided=divided)
            return Sums(loss, metrics, grads, of_count, facts, new_values), new_state

        if context.sharding.microbatches == 1:
            return microbatch_sums(state, rows, mask, 0)
        micro_rows, micro_mask = jax.tree.map(lambda x: _split_microbatches(context, x), (rows, mask))

        xs = micro_rows, micro_mask, jnp.arange(context.sharding.microbatches, dtype=jnp.int32)
        state, first = as_local(context, state), jax.tree.map(lambda x: x[0], xs)
        traced, out = jax.make_jaxpr(microbatch_sums, return_shape=True)(state, *first)
        compute, shapes = jaxprs.function_of(traced, out), out[0]
        of_one = terms(shapes.facts.with_static_counts(shapes.loss, "loss"))
        if shapes.facts.divided and not has_known_counts(of_one):
            of_micro = lambda state, xs: one_microbatch(computed, state, xs[0], xs[1], index, xs[2])[:3]
            whole = over_microbatches(context, of_one, of_micro, state, xs, shapes.facts.count_has_gradient)
            compute = functools.partial(microbatch_sums, whole=whole)

        def add(carry: Any, xs: Any) -> Any:
            total, state = carry
            sums, state = compute(state, *xs)
            return as_local(context, (merge_trees(total, sums), state)), None

        return lax.scan(add, (as_local(context, _zeros(context, shapes)), state), xs)[0]

    return local


def _zeros(context: Context, shapes: Sums) -> Sums:
    zeros = empty_parts(shapes)
    constrained: Callable[[Any], Any] = lambda tree: (
        None if tree is None else trace_context.shard_like_params(context, tree, "compute")
    )
    gradients: dict[str, Any] = {name: constrained(getattr(zeros, name)) for name in ("gradient", "count_gradient")}
    return dataclasses.replace(zeros, **gradients)


def _vjp(fn: Callable[[Any], Any], params: Any) -> tuple[Any, Callable[[Any], Any], Any, bool]:
    """Returns ((sums, counts), pull-back, aux, whether a count depends on the parameters) of `fn(params)`."""
    derivatives = []

    @jax.custom_jvp
    def probe(count: jax.Array) -> jax.Array:
        return count

    @probe.defjvp
    def probe_jvp(primals: Any, tangents: Any) -> Any:  # not called if the tangent is zero
        derivatives.append(tangents[0])
        return primals[0], tangents[0]

    def probed(params: Any) -> Any:
        (sums, counts), aux = fn(params)
        return (sums, tuple(x if isinstance(x, np.floating) else probe(x) for x in counts)), aux

    primals, pull, aux = jax.vjp(probed, params, has_aux=True)
    return primals, pull, aux, bool(derivatives)


def _gradient_shapes(context: Context, params: Any) -> Any:
    dtype = context.options.gradient_dtype
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(jnp.shape(p), dtype or jnp.result_type(p)), params)


def _in_gradient_dtype(context: Context, grads: Any, params: Any) -> Any:
    dtypes = {path: context.options.gradient_dtype or p.dtype for path, p in named_leaves(params)}
    grads = jax.tree.map_with_path(lambda path, g: g.astype(dtypes[path_name(path)]), grads)
    return trace_context.shard_like_params(context, grads, "compute")


def _analysis(
    loss_fn: Loss, stateful: bool, context: Context, params: Any, state: Any, batch: Any, key: Any
) -> Sequence[Usage]:
    """Returns how rows enter the loss, its metrics and the model state; empty if the loss cannot be analyzed."""

    def outputs(params: Any, state: Any, rows: Any, loss_key: Any) -> Any:
        loss, metrics, new_state = checked_loss(
            loss_fn(params, *((state,) if stateful else ()), rows, loss_key), stateful
        )
        return loss, metrics, _checked_state(state, new_state) if stateful else None

    code = getattr(loss_fn, "__code__", type(loss_fn))
    shapes = str(abstract((params, state, batch, key, context.mask)))
    found = (len(context.usage.gradients), code, shapes)
    if found not in context.analyses:
        context.analyses[found] = _analyzed(context, outputs, params, state if stateful else None, batch, key)
    usages: Sequence[Usage] = context.analyses[found]
    return usages


def evaluation_usages(
    context: Context, eval_fn: Loss, stateful: bool, params: Any, state: Any, batch: Any
) -> Sequence[Usage]:
    """Returns how rows enter the metrics of a user's `eval_fn`; empty if it cannot be analyzed."""

    def outputs(params: Any, state: Any, rows: Any, _: Any) -> Any:
        return None, checked_metrics(eval_fn(params, *((state,) if stateful else ()), rows), "eval_fn"), None

    usages = _analyzed(context, outputs, params, state if stateful else None, batch, None)
    return [dataclasses.replace(usage, what="evaluation metric") for usage in usages]


def _analyzed(
    context: Context, outputs: Callable[..., Any], params: Any, state: Any, batch: Any, key: Any
) -> Sequence[Usage]:
    """Returns how rows enter the results of `outputs(params, state, rows, key of the loss)` of one replica."""
    sharding = context.sharding
    shape_of: Callable[[Any, tuple[int, ...]], Any] = lambda tree, lead: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*lead, *x.shape[1:]), x.dtype), tree
    )
    whole = abstract((params, key))
    of_one = abstract(state) if sharding.state_groups is None else shape_of(state, ())
    num = _num_rows(batch) // (sharding.microbatches * (1 if context.inside else sharding.num_replicas))
    inner = context.for_new_trace()
    bound = {} if context.inside else ANALYZED_REPLICAS
    if not context.inside:  # without the mesh
        inner = inner.with_options(remat=None, remat_whole=False).with_sharding(
            form="mapped",
            mesh=None,
            sizes=bound,
            data_axes=("data",),
            inner_axes=(),
            microbatches=1,
            placements=None,
        )

    def replica_inputs(num: int) -> Any:
        rows = shape_of((batch, context.mask), (num,))
        return (*rows, jax.ShapeDtypeStruct((num,), jnp.int32)), whole[1]

    def one_replica(state: Any, shared: Any, of_rows: Any, loss_key: Any) -> Any:
        (params, key), (rows, mask, positions) = shared, of_rows
        examples = trace_context.Examples(_num_rows(rows), mask, positions, key)
        with trace_context.tracing(inner), trace_context.with_examples(examples):
            return outputs(_cast_params(context, params), state, _cast_inputs(context, rows), loss_key)

    larger = sharding.larger(("replica",)) + (("data",) if sharding.larger(sharding.data_axes) else ())
    inputs = Inputs(of_one, whole, replica_inputs, num)
    return analyze(one_replica, inputs, bound, REPLICA_AXES, larger or ("data",)) or ()


def _state_reductions(context: Context, state: Any, usages: Sequence[Usage]) -> agreement.Kinds:
    replicas = context.sharding.num_replicas
    if replicas == 1 or context.sharding.state_groups == replicas:  # no other replica
        return {path: "identical" for path, _ in named_leaves(state)}
    return agreement.state_reductions(context.options.state_reduction, named_leaves(state), usages)


def _checked_state(state: Any, new_state: Any) -> Any:
    """Returns the new model state; raises ConfigError if its tree structure, a shape or a dtype changed."""
    if difference := first_difference(state, new_state):
        raise ConfigError(
            f"loss_fn returned a model state that differs from its input: {difference}. Its tree, shapes and dtypes "
            "stay the same over all steps. Return the whole new state, cast where needed."
        )
    return new_state


# ---- small parts


def _loss_key(key: Any, replica: Any, micro: Any) -> Any:
    return None if key is None else rng.loss_key(key, replica, micro)


def _row_order(context: Context, rows: int) -> RowOrder:
    _, groups = context.group
    shards = groups * context.sharding.num_replicas * context.sharding.num_shards
    return RowOrder(shards, context.sharding.microbatches, rows)


def _first_shard(context: Context, replica: Any) -> Any:
    group, _ = context.group
    return (group * context.sharding.num_replicas + replica) * context.sharding.num_shards


def _positions(context: Context, replica: Any, micro: Any, num: int) -> jax.Array:
    """Returns int32[num]: the global positions of the rows of one microbatch on one replica, over its inner shards."""
    inner = context.sharding.num_shards
    return _row_order(context, num // inner).of_microbatch(_first_shard(context, replica), inner, micro)


def step_examples(context: Context, examples: Any, mask: Any, key: Any, replica: Any = None) -> trace_context.Examples:
    """Returns the rows of a full `train_step`: the global batch (of its group), or the rows of one replica."""
    num = _num_rows(examples)
    num_shards = context.sharding.num_shards * (context.sharding.num_replicas if replica is None else 1)
    order = _row_order(context, num // (num_shards * context.sharding.microbatches))
    positions = order.of_shards(_first_shard(context, 0 if replica is None else replica), num_shards)
    return trace_context.Examples(num, mask, positions, key, whole=replica is None, of_step=True)


def _split_microbatches(context: Context, x: jax.Array) -> jax.Array:
    """Returns [F M b, ...] as [M, F b, ...]. Each inner shard keeps its rows, so no data are sent."""
    microbatches = split(x, 0, context.sharding.num_shards, context.sharding.microbatches)
    return constrain(context, microbatches, (), context.sharding.inner_axes)


def _cast(tree: Any, dtype: Any) -> Any:
    cast = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return tree if dtype is None else jax.tree.map(cast, tree)


def _cast_params(context: Context, params: Any) -> Any:
    """Returns parameters in the compute dtype; those that their gradient overwrites and narrow ones are unchanged."""
    roles = leaf_roles.roles_in(context, params)
    is_kept: Callable[[Any, Any], bool] = lambda path, x: (
        roles.get(path_name(path)) == "overwritten" or is_narrow(x.dtype)
    )
    cast = lambda path, x: x if is_kept(path, x) else _cast(x, context.options.compute_dtype)
    return params if context.options.compute_dtype is None else jax.tree.map_with_path(cast, params)


def _cast_inputs(context: Context, rows: Any) -> Any:
    inputs, dtype = context.options.inputs, context.options.compute_dtype
    return jax.tree.map_with_path(lambda path, x: _cast(x, dtype) if is_cast(inputs, path_name(path)) else x, rows)


def is_cast(inputs: str | Sequence[str], path: str) -> bool:
    """Returns whether `precision.inputs` casts this floating point array of a batch to the compute dtype."""
    return inputs == "compute" if isinstance(inputs, str) else any(re.fullmatch(p, path) for p in inputs)


def _num_rows(rows: Any) -> int:
    num: int = np.shape(jax.tree.leaves(rows)[0])[0]  # symbolic under jax.export
    return num


def _check_differentiable(params: Any, roles: leaf_roles.Roles) -> None:
    for path, leaf in named_leaves(params):
        if roles.get(path) != "frozen" and not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise ConfigError(
                f"parameter {path} is {describe(leaf)}: only floating point leaves have a gradient. Store it in the "
                "model state (sk.Variables) or outside of the parameters."
            )


SEAMS = {
    "local_gradient": _local_gradient,
    "positions": _positions,
    "loss_key": _loss_key,
    "split_microbatches": _split_microbatches,
}
"""Seam name -> the function that `verify` replaces to inject a known mistake (verify/mutations.py)."""
