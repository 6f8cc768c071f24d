"""Selects how a step is compiled: its form, the reducer's state, checks that need its trace, remat of the full loss.

The mesh determines the form (`form_of`), with three exceptions. With one replica, a step that names replica axes is
`mapped`, which binds them; any other step is `plain`. A step that cannot be traced inside `shard_map`, because a
library compares the types of arrays (equinox, diffrax), is `mapped` instead of `manual`. So is a step with ordered
callbacks: XLA does not order those of separate devices (CPU, jaxlib 0.10.2).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax

from spmdkit.communication.reducers.base import Reducer, stateless
from spmdkit.communication.reducers.sum import make as plain_sum
from spmdkit.compat import callbacks
from spmdkit.errors import ConfigError, SpmdkitError
from spmdkit.foundation import plugins
from spmdkit.foundation.user_code import call_user
from spmdkit.ops.remat import POLICIES, check_names, check_policy
from spmdkit.program import groups, padding_check
from spmdkit.program.state_layout import layout_from_table
from spmdkit.program.step_context import form_of, names_replicas
from spmdkit.program.task_step import TaskStep
from spmdkit.program.unused_settings import check_used
from spmdkit.program.xla_defects import check_pools
from spmdkit.step import reducer_state
from spmdkit.step.dataflow.constants import check_constants
from spmdkit.step.explicit import explicit_contexts, global_context, needs_explicit_axes
from spmdkit.step.trace_context import Context


class ChosenForm(NamedTuple):
    """A step and its form.

    Attributes:
        task_step: the step, with the reducer's state in its train state.
        context: context of the step.
        traced: the step traced in that context, if that was its last trace; otherwise None.
        refused: why the step does not have the `manual` form of its mesh; may be empty.
    """

    task_step: TaskStep
    context: Context
    traced: jax.stages.Traced | None
    refused: str


def choose_form(task_step: TaskStep, context: Context, num_replicas: int, probe_padding: bool) -> ChosenForm:
    """Returns the step and its form.

    Args:
        context: context from the config, without a form.
        num_replicas: number of replicas on the full mesh.
        probe_padding: whether to check that padding rows do not count, if batches can be short.
    """
    reducer, name = context.options.reducer, plugins.split(task_step.config.reducer)[0]
    form = form_of(task_step.task, task_step.sizes, num_replicas)
    if task_step.groups is not None:
        context = context.with_sharding(sizes=task_step.groups.inner(task_step.sizes))
        form = "plain" if context.sharding.num_replicas == 1 else "mapped"
    has_state = reducer.init is not stateless and context.sharding.num_replicas > 1
    if has_state and task_step.groups is not None:
        groups.check_reducer(task_step.groups, task_step.config)
    if has_state:  # traced without the state to find the calls of sk.value_and_grad
        context = context.with_options(reducer=plain_sum())
    candidates = [context.with_sharding(form=form)]
    if task_step.task.sharding == "explicit":
        candidates = explicit_contexts(context)
    elif form == "manual" and not task_step.task.is_manual:
        candidates.append(context.with_sharding(form="mapped"))
    context, traced, errors = _first_traced(task_step, context, candidates)
    if form == "plain" and task_step.groups is None and names_replicas(traced.jaxpr):
        context, traced = _traced(task_step, context.with_sharding(form="mapped"))
    in_manual = context.sharding.form == "manual" and task_step.task.view == "global"
    refused = "".join(map(str, errors))  # as text: an exception would keep its frames alive
    if in_manual and callbacks.has_ordered_effects(traced.jaxpr):
        context, traced = _traced(task_step, context.with_sharding(form="mapped"))
        refused = f"{task_step.what} has callbacks with ordered=True, which keep their order on one device alone"
    reducer_state.check_effect(name, reducer, context, task_step.sizes, task_step.what)
    if leaves := reducer_state.reduced_leaves(context):
        reducer.check(leaves)
    if has_state:
        task_step, context = _with_state_of(task_step, reducer, context)
        context, traced = _traced(task_step, context)
    return ChosenForm(task_step, *_settled(task_step, context, traced, probe_padding), refused)


def _first_traced(
    task_step: TaskStep, context: Context, candidates: Sequence[Context]
) -> tuple[Context, jax.stages.Traced, list[SpmdkitError]]:
    """Returns the first context in which the step can be traced, the step, and the errors in those before. After the
    candidates, a step that cannot be mapped over the replicas (a `jax.shard_map` of the user), or in explicit mode, is
    traced on global arrays."""
    roles, of_replica = context.sharding.roles, task_step.task.view == "replica"
    errors = list[SpmdkitError]()
    lines = set[str]()

    def tried(candidates: Sequence[Context]) -> tuple[Context, jax.stages.Traced] | None:
        for candidate in candidates:
            fresh = candidate.for_new_trace()
            try:
                return fresh, call_user(functools.partial(task_step.trace, fresh), task_step.what)
            except SpmdkitError as error:
                errors.append(error)
                lines.update(fresh.usage.shard_maps)
        return None

    if found := tried(candidates):
        return *found, errors
    if lines and of_replica:
        raise ConfigError(
            f"{task_step.what} calls jax.shard_map ({min(lines)}) in a per-replica step, which is mapped over the "
            f"replicas already: {errors[0]}\nRemove the shard_map, or view='replica' and use global arrays."
        )
    cannot_be_mapped = lines or any("Batching rule for" in str(error) for error in errors)  # jax.custom_partitioning
    more = [global_context(context)] if cannot_be_mapped and not of_replica and task_step.groups is None else []
    if not of_replica and any(needs_explicit_axes(error, roles) for error in errors):
        more += explicit_contexts(context)
    if found := tried(more):
        return *found, errors
    raise errors[-1 if more or candidates[0].sharding.explicit else 0]


def _traced(task_step: TaskStep, context: Context) -> tuple[Context, jax.stages.Traced]:
    """Returns (a context with a new usage record, the step traced in it)."""
    context = context.for_new_trace()
    return context, call_user(functools.partial(task_step.trace, context), task_step.what)


def _with_state_of(task_step: TaskStep, reducer: Reducer, context: Context) -> tuple[TaskStep, Context]:
    """Returns (the step, its context) with a stateful reducer; its state becomes part of the train state."""
    context = context.with_options(reducer=reducer)
    state, table = reducer_state.shapes(reducer, context.usage.gradients, context)
    placed = task_step.state
    abstract = placed.abstract.replace(reducer=state)
    whole = layout_from_table([*placed.table, *table], abstract, task_step.mesh, placed.placements)
    return dataclasses.replace(task_step, state=whole), context


def _settled(
    task_step: TaskStep, context: Context, traced: jax.stages.Traced, probe_padding: bool
) -> tuple[Context, jax.stages.Traced | None]:
    """Checks the features that the user's step uses. Applies remat to the full loss if it never calls `sk.remat`."""
    config, last = task_step.config, traced
    if task_step.task.train_step is not None:  # the analysis compares two traces of a loss
        again = task_step.function(context.for_new_trace())
        check_constants(traced.jaxpr, jax.make_jaxpr(again)(task_step.state.abstract, task_step.batch), task_step.what)
    check_used(config, context, task_step.state.table, task_step.always_full, task_step.what)
    check_pools(traced.jaxpr, task_step.sizes, task_step.what)
    if probe_padding and not task_step.always_full:
        padding_check.check_first_dims(context, task_step.shapes, task_step.batch, task_step.what)
    whole = context.options.remat is not None and not context.usage.has_called("remat")
    if whole:
        context = context.with_options(remat_whole=True)
    by_names = not isinstance(config.remat, str) or config.remat in POLICIES
    if by_names and whole:
        context, whole = context.for_new_trace(), False
        last = task_step.trace(context)  # only recomputed functions record names
    if isinstance(config.remat, str):
        if by_names:
            check_policy(config.remat, context.usage.marks, task_step.what)
    else:
        for key, names in (("save", config.remat.save), ("offload", config.remat.offload)):
            check_names(key, names, context.usage.marks, task_step.what)
    return context, None if whole else last
