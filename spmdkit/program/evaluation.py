"""`Evaluator`: computes metrics over a full evaluation set of any size, exact through masks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.compat import callbacks
from spmdkit.config.sections import Checkpoint
from spmdkit.data.feed import Feed
from spmdkit.errors import ConfigError
from spmdkit.foundation import jaxprs, phase
from spmdkit.foundation.formatting import nearest
from spmdkit.foundation.user_code import call_user
from spmdkit.program import padding_check
from spmdkit.program.step_context import names_replicas
from spmdkit.program.task import Task
from spmdkit.step import rng, trace_context
from spmdkit.step.checks.return_values import checked_loss
from spmdkit.step.dataflow.analysis import Usage
from spmdkit.step.explicit import call_explicit
from spmdkit.step.gradient import evaluate, evaluation_usages
from spmdkit.step.metrics.base import Metric, add_on_host, empty_parts, merge_next_batch
from spmdkit.step.metrics.mean import Mean
from spmdkit.step.model_state import agreement
from spmdkit.step.state import TrainState
from spmdkit.step.step import Batch

NEEDS_KEY = (
    "evaluation runs loss_fn with random keys that are the same at every evaluation, since it does not accept "
    "key=None: dropout stays on. Pass Task(eval_fn=...) for a deterministic evaluation."
)


class Evaluator:
    """The evaluation of all sets of one program: traced when created, compiled when called. Sets with batches of equal
    shapes share a compiled program.

    Attributes:
        names: the scalar metrics, with the name of a set as `NAME/`.
        note: a note for the user, or None.
    """

    def __init__(self, feeds: Mapping[str, Feed], make: Callable[[Feed], SetEvaluator]):
        self._feeds, self._of, of_shape = feeds, dict[str, SetEvaluator](), dict[Any, SetEvaluator]()
        for name, feed in feeds.items():
            key = str(feed.abstract()), feed.ends
            self._of[name] = of_shape.get(key) or of_shape.setdefault(key, make(feed))
        self._first = next(iter(self._of.values()))
        self.note, self.row_usages = self._first.note, self._first.row_usages
        self.names = tuple(_named(name, metric) for name, one in self._of.items() for metric in one.names)

    @property
    def lowered(self) -> dict[str, jax.stages.Lowered]:
        """The name of a set -> the evaluation of one of its batches, as passed to the compiler."""
        return {name: one.lowered for name, one in self._of.items()}

    def __call__(self, state: TrainState, name: str | None = None) -> dict[str, Any]:
        """Returns the metrics over all sets, or one of them: numbers, and arrays of `sk.bincount`. Waits for the
        device.

        Raises:
            ConfigError: padding rows of a short batch would count, checked at the first; or no such set.
        """
        if name is not None and name not in self._of:
            sets = ", ".join(filter(None, self._of))
            raise ConfigError(
                f"eval_data has no set {name}: "
                + (f"it has {sets}.{nearest(name, sets.split(', '))} Use one of them." if sets else "it is one set. ")
                + ("" if sets else "Evaluate all of it, or pass Task(eval_data={NAME: data, ...}).")
            )
        chosen = self._of if name is None else {name: self._of[name]}
        return {
            _named(name, metric): value
            for name, one in chosen.items()
            for metric, value in one(state, self._feeds[name]).items()
        }

    def of_batches(self, state: TrainState) -> dict[str, Iterator[dict[str, Metric]]]:
        """Returns the name of a set -> `SetEvaluator.of_batches`."""
        return {name: one.of_batches(state, self._feeds[name]) for name, one in self._of.items()}


def _named(name: str, metric: str) -> str:
    return f"{name}/{metric}" if name else metric


class SetEvaluator:
    """The evaluation of sets with batches of equal shapes. `feed`: the batches of one of them.

    Attributes:
        of_batch: `(state, batch, number of the batch) -> metrics`, to be traced.
    """

    def __init__(
        self,
        task: Task,
        feed: Feed,
        context: trace_context.Context,
        abstract_state: TrainState,
        *,
        params_of: Callable[[TrainState], Any],
        seed: int,
        to_device: Callable[[TrainState], TrainState],
        compile: Callable[[jax.stages.Lowered], jax.stages.Compiled],
        probe_padding: bool = True,
    ):
        self._probe = probe_padding
        self._what = "eval_fn" if task.eval_fn else "loss_fn in evaluation"
        stateful, groups = abstract_state.model_state is not None, context.sharding.state_groups
        context = context.with_options(remat=None, remat_whole=False).with_sharding(microbatches=1, state_groups=None)
        context = context.for_new_trace()
        assert context.sharding.mesh is not None
        self._whole = NamedSharding(context.sharding.mesh, PartitionSpec())
        abstract_batch = feed.abstract()
        on_device = jax.eval_shape(to_device, abstract_state)
        number = jax.ShapeDtypeStruct((), jnp.int32)

        def of_batch(current: TrainState, batch: Batch, number: Any) -> dict[str, Metric]:
            fixed = evaluate(eval_fn, stateful), context, groups is not None, params_of, key_seed
            sums_of: Callable[..., dict[str, Metric]] = functools.partial(_sums_of, *fixed)
            if context.sharding.explicit:
                placed = jax.tree.map(lambda x: x.sharding, abstract_state)
                sums_of = functools.partial(_call_explicit, context, sums_of, placed)
            return sums_of(to_device(current), batch.examples, batch.mask, number)

        def trace() -> Any:
            make = jax.make_jaxpr(functools.partial(of_batch), return_shape=True)  # JAX caches traces of a function
            return call_user(functools.partial(make, abstract_state, abstract_batch, number), self._what)

        def lowered() -> jax.stages.Lowered:
            sums_of_batch = jaxprs.function_of(*(traced.pop() if traced else trace()))  # a trace holds constants
            return _lowered(sums_of_batch, self._totals, abstract_state, abstract_batch, self._whole, feed.ends)

        eval_fn, key_seed, self.note = _function(task, stateful, False), None, None
        try:
            traced = [trace()]
        except Exception:  # any failure of a loss means that it needs a key
            if task.eval_fn is not None:
                raise
            eval_fn, key_seed, self.note = _function(task, stateful, True), seed, NEEDS_KEY
            context = context.for_new_trace()
            traced = [trace()]
        self.row_usages: Sequence[Usage] = ()
        if task.eval_fn is not None and not context.sharding.explicit:
            masked = dataclasses.replace(context, mask=abstract_batch.mask)
            arguments = jax.eval_shape(params_of, on_device), on_device.model_state, abstract_batch.examples
            self.row_usages = evaluation_usages(masked, eval_fn, stateful, *arguments)
        if _needs_mapped(context, traced[0][0], task):
            context = context.with_sharding(form="mapped").for_new_trace()
            traced = [trace()]
        self._totals = number, traced[0][1]
        self._lower, self._compile, self.of_batch = lowered, compile, of_batch
        self.names = tuple(name for name, x in jax.eval_shape(_values, self._totals[1]).items() if not x.shape)

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """The evaluation of one batch as passed to the compiler; deleted after compilation."""
        return self._lower()

    @functools.cached_property
    def _compiled(self) -> jax.stages.Compiled:
        return self._compile(self.__dict__.pop("lowered", None) or self._lower())

    def __call__(self, state: TrainState, feed: Feed) -> dict[str, Any]:
        """Returns the metrics over the full set of `feed`."""
        totals = empty_parts(self._totals[1], np.full)
        for sums in self.of_batches(state, feed, self._probe):
            totals = add_on_host(totals, sums)
        return {name: _value(metric) for name, metric in totals.items()}

    def of_batches(self, state: TrainState, feed: Feed, probe: bool = False) -> Iterator[dict[str, Metric]]:
        """Yields the metrics after each batch: what is added is of this batch alone, all else of all batches so far.

        Args:
            probe: whether the first batch with padding rows is checked.
        """
        carried = zeros = jax.device_put(empty_parts(self._totals, np.full), self._whole)
        with feed.stream(1, feed.num_batches) as batches:
            while True:
                with phase.during(phase.EVALUATION, phase.READING):
                    if (item := next(batches, None)) is None:
                        break
                number, batch, _ = item
                if batch.mask is not None and probe:
                    self._check_padding(functools.partial(self._compiled, zeros, state), batch, feed)
                    self._probe = probe = False
                # Several processes with several CPU devices deadlock with much work in flight. So wait each time.
                carried = self._compiled(carried, state, batch)
                if feed.is_empty(number) and int(carried[0]) < number:  # a stream has ended on all processes
                    break
                yield carried[1]

    def _check_padding(self, run: Callable[[Batch], Any], batch: Batch, feed: Feed) -> None:
        def by_kind(batch: Batch) -> dict[str, Any]:
            _, sums = run(batch)
            means = {name: m for name, m in sums.items() if isinstance(m, Mean)}
            return {
                "the sum of metric": {name: m.sum for name, m in means.items()},
                "the count of metric": {name: m.count for name, m in means.items()},
                "the value of metric": _values({name: m for name, m in sums.items() if name not in means}),
            }

        if effects := padding_check.changes(by_kind, batch, feed.grid(feed.schedule.batch_size), self._whole):
            raise padding_check.refused_evaluation(effects, self._what, feed.schedule)


def _lowered(
    sums_of_batch: Callable[..., dict[str, Metric]],
    totals: Any,
    state: TrainState,
    batch: Batch,
    whole: NamedSharding,
    ends: bool,
) -> jax.stages.Lowered:
    """Returns `(totals, state, batch) -> totals` as passed to the compiler, with totals `(batches, metrics)`. `ends`:
    a batch without rows is not counted."""

    def evaluate(totals: Any, state: TrainState, batch: Batch) -> tuple[Any, dict[str, Metric]]:
        number, before = totals
        counted = batch.mask.any().astype(jnp.int32) if ends and batch.mask is not None else 1
        return number + counted, merge_next_batch(before, sums_of_batch(state, batch, number))

    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), totals)
    return jax.jit(evaluate, out_shardings=whole).lower(placed, state, batch)


def _needs_mapped(context: trace_context.Context, jaxpr: Any, task: Task) -> bool:
    """Returns whether an evaluation can only run in the form that binds the names of the replicas' axes."""
    if context.sharding.form == "plain":
        return not context.usage.shard_maps and names_replicas(jaxpr)
    return context.sharding.form == "manual" and callbacks.has_ordered_effects(jaxpr) and task.view == "global"


def _values(metrics: dict[str, Metric]) -> dict[str, Any]:
    return {name: metric.value for name, metric in metrics.items()}


def _value(metric: Metric) -> Any:
    """Returns `metric.value` on the host: a float, or an array of counts."""
    if isinstance(metric, Mean):
        with np.errstate(divide="ignore", invalid="ignore"):
            counted = metric.count if metric.num is None else metric.num
            return float(np.divide(metric.sum, metric.count)) if counted else 0.0
    value = np.asarray(metric.value)
    return value if value.ndim else float(value)


def _call_explicit(context: trace_context.Context, function: Callable[..., Any], shardings: Any, *args: Any) -> Any:
    with trace_context.tracing(context):
        return call_explicit(context, function, shardings, *args)


def _sums_of(
    evaluated: Callable[..., dict[str, Metric]],
    context: trace_context.Context,
    has_groups: bool,
    params_of: Callable[[TrainState], Any],
    key_seed: int | None,
    current: TrainState,
    examples: Any,
    mask: Any,
    number: Any,
) -> dict[str, Metric]:
    """Returns the metrics of one batch. `key_seed`: the seed of the random key of the function; None: it has no key."""
    params, model_state = params_of(current), current.model_state
    if has_groups:
        model_state = agreement.merge_groups(context.options.state_reduction, model_state)
    inner = dataclasses.replace(context, mask=mask)
    with trace_context.tracing(inner), trace_context.bound_replicas(inner):
        key = None if key_seed is None else rng.evaluation_key(key_seed)
        return evaluated(params, model_state, examples, key, number)


def _function(task: Task, stateful: bool, needs_key: bool) -> Callable[..., Any]:
    """Returns the function to evaluate. `needs_key`: whether the last argument of a `loss_fn` is a random key."""
    if task.eval_fn is not None:
        return task.eval_fn
    loss_fn = task.loss_fn
    if loss_fn is None:
        raise ConfigError("evaluation needs Task.eval_fn or Task.loss_fn; this task has only train_step. Pass eval_fn.")

    def eval_fn(*args: Any) -> dict[str, Metric]:
        loss, metrics, _ = checked_loss(loss_fn(*args, *(() if needs_key else (None,))), stateful)
        return {"loss": loss, **metrics}

    return eval_fn


def check_best(options: Checkpoint | None, names: Sequence[str]) -> None:
    """Raises ConfigError if the best checkpoint is selected by a metric that the evaluation does not compute."""
    best = options and options.best
    if best and best.metric not in names:
        raise ConfigError(
            f"checkpoint.best.metric is {best.metric}, but the evaluation has {', '.join(names)}. The best checkpoint "
            f"is selected by a metric of the evaluation.{nearest(best.metric, names)} Use one of them."
        )
