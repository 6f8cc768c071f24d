"""The training step as one function, built from a loss, a global step or a per-replica step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import describe, first_difference, is_key, path_name, summary
from spmdkit.mesh.mesh import REPLICA_AXES
from spmdkit.step import trace_context
from spmdkit.step.checks.replica_agreement import require_same
from spmdkit.step.checks.return_values import RULE, check_metric_names, is_array, shape_of
from spmdkit.step.conditional_update import conditional_update
from spmdkit.step.finite_check import apply_guard, guard_code, guard_skips, is_skipped
from spmdkit.step.gradient import means_and_grad, step_examples
from spmdkit.step.leaf_roles import differentiated
from spmdkit.step.lowering import whole_state_specs
from spmdkit.step.metrics.base import is_metric
from spmdkit.step.metrics.user_metric import as_metric
from spmdkit.step.reducer_io import ReducerSlots
from spmdkit.step.state import FIELDS, ReplicaCopy, TrainState, without_copies
from spmdkit.step.trace_context import Context

COMPILED_NAME = "train_step"
"""The name of the compiled step in profiles and in XLA's dumps."""

StepFn = Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]


class StepChecks(NamedTuple):
    """What the host reads of a step at log steps.

    Attributes:
        code: the code of the guard, or None (finite_check.py).
        sizes: the sizes of the updates of narrow parameters, or None (lost_updates.py).
        rows: the number of rows of the global batch, if the data end; otherwise None.
        squares: the squares of the gradient, or None (finite_check.py).
    """

    code: Any
    sizes: Any
    rows: Any = None
    squares: Any = None


Stepped = tuple[TrainState, dict[str, Any], StepChecks]
"""The result of a step to compile: the state, its metrics, and its checks."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A global batch on the devices.

    Attributes:
        examples: the user's pytree; every leaf [global batch, ...], sharded over the batch axes.
        mask: bool[global batch], False on padding rows; None if no batch is short.
        limit: float32[]; a larger loss is a spike (`on_spike`). None without a limit.
    """

    examples: Any
    mask: jax.Array | None = None
    limit: jax.Array | None = None

    def __repr__(self) -> str:
        mask = "every row is an example" if self.mask is None else f"mask {describe(self.mask)}, False on padding"
        return f"Batch: global arrays in .examples\n  examples: {summary(self.examples)}\n  {mask}"

    def limited(self, limit: jax.Array | None) -> Batch:
        """Returns the batch with this limit."""
        return self if self.limit is limit else dataclasses.replace(self, limit=limit)


def default_step(loss_fn: Callable[..., Any], stateful: bool) -> StepFn:
    """Returns the step of a task that has only a `loss_fn`. The optimizer also receives the loss and its function."""

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        model_state = (state.model_state,) if stateful else ()
        compute: Callable[[Any], Any] = lambda params: means_and_grad(loss_fn)(
            differentiated(params), *model_state, batch, state.key
        )
        (loss, metrics, *new_state), grads = compute(state.params)
        new = state.apply_gradients(grads, *new_state, value=loss.value, grad=grads, value_fn=_loss_of(compute))
        return new, {"loss": loss, **metrics}

    return train_step


def _loss_of(compute: Callable[[Any], Any]) -> Callable[[Any], jax.Array]:
    """Returns `params -> loss` over the full batch, for line searches, with the gradient of `compute`."""

    @jax.custom_vjp
    def value(params: Any) -> jax.Array:
        return forward(params)[0]

    def forward(params: Any) -> tuple[jax.Array, Any]:
        (loss, *_), grads = compute(params)
        return loss.value, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

    value.defvjp(forward, lambda grads, out: (jax.tree.map(lambda g: g * out.astype(g.dtype), grads),))
    return value


def with_hooks(train_step: StepFn, hooks: Sequence[Any]) -> StepFn:
    """Returns the step including the `in_step(old, new, metrics) -> (new, metrics)` of each hook, in order."""
    calls = [hook.in_step for hook in sorted(hooks, key=lambda hook: hook.order) if hook.in_step is not None]
    if not calls:
        return train_step

    def hooked(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        new_state, metrics = _checked(state, train_step(state, batch))
        out = with_program_fields(state, new_state), metrics
        old = without_copies(state)
        for call in calls:
            out = _checked(old, call(old, without_copies(out[0]), out[1]))
        return out

    return hooked


def global_step(
    train_step: StepFn, context: Context, to_device: Callable[[Any], Any]
) -> Callable[[TrainState, Batch], Stepped]:
    """Returns the function to compile for a step on global arrays.

    Args:
        to_device: copies leaves from host memory to the devices.
    """

    def stepped(state: TrainState, batch: Batch) -> Stepped:
        rows = step_examples(context, batch.examples, batch.mask, state.key)
        slots = ReducerSlots(state.reducer)
        inner = dataclasses.replace(context, mask=batch.mask, slots=slots)
        bound = trace_context.bound_replicas(context)
        with trace_context.tracing(inner), trace_context.with_examples(rows), bound:
            out = train_step(state, batch.examples)
        new_state, metrics = _checked(state, out)
        metrics = {**metrics, **slots.metrics}
        new_state = with_program_fields(state, new_state, context).replace(reducer=slots.new_state())
        code, squares = guard_code(context, new_state.params, metrics, slots, batch.limit)
        return new_state, metrics, StepChecks(code, slots.sizes, squares=squares)

    def skippable(state: TrainState, batch: Batch) -> tuple[TrainState, Any, jax.Array]:
        new, metrics, checks = stepped(state, batch)
        assert checks.code is not None
        return new.replace(step=None, rng=None), (new.step, new.rng, metrics, checks), is_skipped(context, checks.code)

    def whole_step(state: TrainState, batch: Batch) -> Stepped:
        state = to_device(state)
        if not guard_skips(context):
            return stepped(state, batch)
        new, (step, rng, metrics, checks) = conditional_update(
            skippable, state.replace(step=None, rng=None), state, batch
        )
        return new.replace(step=step, rng=rng), metrics, checks

    whole_step.__name__ = COMPILED_NAME
    return whole_step


def unchanged_without_rows(
    step: Callable[[TrainState, Batch], Stepped], to_device: Callable[[Any], Any]
) -> Callable[[TrainState, Batch], Stepped]:
    """Returns a step that leaves the state unchanged, also its number, if all rows of the global batch are missing."""

    def counted(state: TrainState, batch: Batch) -> tuple[TrainState, Any, jax.Array]:
        assert batch.mask is not None
        new, metrics, checks = step(state, batch)
        rows = batch.mask.sum(dtype=jnp.int32)
        return new, (metrics, checks._replace(rows=rows)), rows == 0

    def whole_step(state: TrainState, batch: Batch) -> Stepped:
        state = to_device(state)
        new, (metrics, checks) = conditional_update(counted, state, state, batch)
        return new, metrics, checks

    whole_step.__name__ = COMPILED_NAME
    return whole_step


def replica_step(
    train_step: StepFn,
    context: Context,
    to_device: Callable[[Any], Any],
    typed: bool = True,
) -> Callable[[TrainState, Batch], Stepped]:
    """Returns the function to compile for a per-replica step: the user's step runs inside `shard_map`.

    Parameters are passed as local copies. Results must be provably the same on all replicas (ConfigError otherwise).

    Args:
        typed: False for a trace that contains only the user's sums and none from JAX's types.
    """
    rows = PartitionSpec(context.sharding.larger(REPLICA_AXES) or REPLICA_AXES)

    def body(state: TrainState, examples: Any, mask: Any, limit: Any) -> Stepped:
        local_params, examples, mask = compat.as_varying((state.params, examples, mask), REPLICA_AXES)
        slots = ReducerSlots(jax.tree.map(lambda x: x[0], state.reducer))
        inner = dataclasses.replace(context.with_sharding(form="manual"), inside=True, mask=mask, slots=slots)
        own_rows = step_examples(inner, examples, mask, state.key, lax.axis_index(REPLICA_AXES))
        with trace_context.tracing(inner), trace_context.with_examples(own_rows):
            handed = state.replace(params=local_params, replica_copy=ReplicaCopy(local_params, state.params))
            new_state, metrics = _checked(state, train_step(handed, examples))
            metrics = {**metrics, **slots.metrics}
        new_state = without_copies(with_program_fields(state, new_state, inner)).replace(reducer=())
        update = " and update through state.apply_gradients"
        new_state = _require_same_on_replicas(inner, new_state, "state leaf", update)
        metrics = _require_same_on_replicas(inner, metrics, "metric")
        new_state, metrics, sizes = jax.tree.map(_untype_trivial, (new_state, metrics, slots.sizes))
        reducer_state = compat.as_varying(jax.tree.map(lambda x: x[None], slots.new_state()), REPLICA_AXES)
        new_state = new_state.replace(reducer=reducer_state)
        new_state, code, squares = apply_guard(inner, state, new_state, metrics, slots, limit)
        return new_state, metrics, StepChecks(code, sizes, squares=squares)

    def whole_step(state: TrainState, batch: Batch) -> Stepped:
        whole, per_shard = PartitionSpec(), context.options.reducer.per_shard_state
        reducer_specs = whole_state_specs(context, state.reducer) if per_shard else PartitionSpec(REPLICA_AXES)
        states = state.replace(**dict.fromkeys(FIELDS, whole) | {"reducer": reducer_specs})
        in_specs, out_specs, mesh = (states, rows, rows, whole), (states, whole, whole), context.sharding.mesh
        mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=typed)
        return mapped(to_device(state), batch.examples, batch.mask, batch.limit)

    whole_step.__name__ = COMPILED_NAME
    return whole_step


def _require_same_on_replicas(context: Context, tree: Any, what: str, more: str = "") -> Any:
    rule = (
        "a reduction is missing. The results of a per-replica step must be the same on every replica. Apply sk.pmean "
        f"to it{more}."
    )
    same = lambda path, x: require_same(context, x, f"train_step: {what} '{path_name(path)}'", rule)
    return jax.tree.map_with_path(same, tree)


def with_program_fields(state: TrainState, new_state: TrainState, context: Context | None = None) -> TrainState:
    """Returns the new state with the fields that the program manages: the step number, and the root of all keys.

    A step with four updates is one step. `context` records whether the step computed a new parameter average.
    """
    if context is not None:
        averages = zip(jax.tree.leaves(state.ema), jax.tree.leaves(new_state.ema), strict=True)
        if any(new is not old for old, new in averages):
            context.usage.record_call("ema")
    return new_state.replace(step=state.step + 1, rng=state.rng)


def _untype_trivial(x: Any) -> Any:
    """Returns `x`, which varies only over axes of size one, typed as invariant: a sum of one term."""
    axes = tuple(compat.varying_axes(x))
    if axes and is_key(x):
        return jax.random.wrap_key_data(lax.psum(jax.random.key_data(x), axes), impl=jax.random.key_impl(x))
    return lax.psum(x, axes).astype(x.dtype) if axes else x


def _checked(state: TrainState, out: Any) -> tuple[TrainState, dict[str, Any]]:
    new_state, metrics = checked(state, out)
    return new_state, {name: metric.value if is_metric(metric) else metric for name, metric in metrics.items()}


def checked(state: TrainState, out: Any) -> tuple[TrainState, dict[str, Any]]:
    """Returns (state, metrics as scalars or `Metric`) from the return value of a user's step, or raises ConfigError."""
    is_pair = isinstance(out, tuple) and len(out) == 2
    if not (is_pair and isinstance(out[0], TrainState) and isinstance(out[1], dict)):
        types = [describe(x) for x in out] if isinstance(out, tuple) else []
        found = f"{len(types)} values ({', '.join(types)})" if types else "None" if out is None else describe(out)
        raise ConfigError(
            f"train_step returned {found}. It must return (state, metrics): the TrainState and a dict of scalars."
        )
    new_state, metrics = out
    check_metric_names(metrics, "train_step")
    difference = first_difference(without_copies(state), without_copies(new_state))
    if difference:
        raise ConfigError(
            f"train_step changed the state: {difference}. Shapes and dtypes of the state stay the same over all steps."
        )
    alike: dict[str, Any] = {}
    for name, value in metrics.items():
        metric = as_metric(value, f"train_step: metric '{name}'")
        is_number = isinstance(metric, int | float) or hasattr(metric, "dtype")
        alike[name] = jnp.asarray(metric) if is_number else metric
        if not (is_number or is_metric(metric)) or (jnp.ndim(alike[name]) if is_number else is_array(metric)):
            raise ConfigError(
                f"train_step returned metric '{name}' as {shape_of(metric)}. {RULE}, or a scalar. Write '{name}': "
                "sk.mean(...)."
            )
    return new_state, alike
