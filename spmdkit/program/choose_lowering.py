"""How a step is compiled: the first form of the mesh in which the user's functions can be traced, and the reducer state
that it needs.

forms of the mesh -> the first that can be traced -> the reducer state in the train state -> the ops that the step uses
-> remat
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from spmdkit.communication.reducers.base import Reducer, stateless
from spmdkit.communication.reducers.sum import make as plain_sum
from spmdkit.errors import SpmdkitError
from spmdkit.foundation import plugins
from spmdkit.foundation.user_code import call_user
from spmdkit.ops.remat import check_names
from spmdkit.program import groups, padding_check
from spmdkit.program.state_layout import StateLayout, laid_out
from spmdkit.program.step_context import forms_of
from spmdkit.program.task_step import TaskStep
from spmdkit.program.unused_settings import check_used
from spmdkit.program.xla_defects import check_pools
from spmdkit.step import reducer_state, trace_context


class ChosenForm(NamedTuple):
    """A step with its form.

    Attributes:
        context: of the step.
        traced: the step in that context, where it was traced last; otherwise None.
        state: where the train state lives, with what the reducer keeps.
        kept: what the reducer keeps, abstract: `TrainState.reducer`.
        refused: rejected forms, each with its reason as text, since an error keeps all that its frames
            hold.
    """

    context: trace_context.Context
    traced: jax.stages.Traced | None
    state: StateLayout
    kept: tuple[Any, ...]
    refused: tuple[tuple[trace_context.Form, str], ...]


def choose_form(
    task_step: TaskStep, context: trace_context.Context, num_replicas: int, probe_padding: bool
) -> ChosenForm:
    """Returns the step in the first form that it can be traced in.

    Args:
        context: of the config; its form is not chosen yet.
        num_replicas: on the whole mesh.
        probe_padding: whether to look if padding rows count, where batches can be short.

    Raises:
        ConfigError, UserCodeError: no form takes the user's functions, or they do not use a setting of the config.
    """
    reducer = context.options.reducer
    forms = forms_of(task_step.task.view, task_step.sizes, num_replicas)
    if task_step.groups is not None:
        context = context.with_sharding(sizes=task_step.groups.inner(task_step.sizes))
        forms = ("plain",) if context.sharding.num_replicas == 1 else ("mapped",)
    keeps = reducer.init is not stateless and context.sharding.num_replicas > 1
    if keeps and task_step.groups is not None:
        groups.check_reducer(task_step.groups, task_step.config)
    if keeps:  # the form and the calls are found without it
        context = context.with_options(reducer=plain_sum())
    context, traced, refused = _first_traced(
        task_step, [context.with_sharding(form=form).for_new_trace() for form in forms]
    )
    reducer_state.check_effect(
        plugins.split(task_step.config.reducer)[0], reducer, context, task_step.sizes, task_step.what
    )
    reducer_state.check_leaves(reducer, context)
    kept: tuple[Any, ...] = ()
    if keeps:
        task_step, context, kept = _with_state_of(task_step, reducer, context)
        traced = call_user(functools.partial(task_step.trace, context), task_step.what)
    settled, last = _settle(task_step, context, traced, probe_padding)
    return ChosenForm(settled, last, task_step.state, kept, refused)


def _first_traced(
    task_step: TaskStep, contexts: Sequence[trace_context.Context]
) -> tuple[trace_context.Context, jax.stages.Traced, tuple[tuple[trace_context.Form, str], ...]]:
    """Returns (the first context in whose form the user's functions can be traced, its trace, what refused those
    before).

    What one form refuses, another may take: `plain` binds no names of replica axes. If none does, the first error is
    raised.
    """
    errors = list[SpmdkitError]()
    for context in contexts:
        try:
            traced = call_user(functools.partial(task_step.trace, context), task_step.what)
        except SpmdkitError as error:
            errors.append(error)
            continue
        return context, traced, tuple((r.sharding.form, str(e)) for r, e in zip(contexts, errors, strict=False))
    raise next((error for error in errors if not trace_context.is_unbound_axis(error.__cause__)), errors[0])


def _with_state_of(
    task_step: TaskStep, reducer: Reducer, context: trace_context.Context
) -> tuple[TaskStep, trace_context.Context, tuple[Any, ...]]:
    """Returns (the step, its context, what is kept) with a reducer that keeps something, for which the train state gets
    its place."""
    gradients = call_user(functools.partial(task_step.gradient_shapes, context), task_step.what)
    context = context.with_options(reducer=reducer).for_new_trace()
    kept, table = reducer_state.shapes(reducer, gradients, context)
    placed = task_step.state
    abstract = placed.abstract.replace(reducer=kept)
    state = laid_out([*placed.table, *table], abstract, task_step.mesh, placed.placements)
    return dataclasses.replace(task_step, state=state), context, kept


def _settle(
    task_step: TaskStep, context: trace_context.Context, traced: jax.stages.Traced, probe_padding: bool
) -> tuple[trace_context.Context, jax.stages.Traced | None]:
    """Checks what the user's step has used, and wraps the whole loss where it asks for no `sk.remat` itself."""
    config, last = task_step.config, traced
    check_used(config, context, task_step.state.table, task_step.always_full, task_step.what)
    check_pools(traced.jaxpr, task_step.sizes, task_step.what)
    if probe_padding and not task_step.always_full:
        padding_check.check_first_dims(context, task_step.shapes, task_step.batch, task_step.what)
    whole = context.options.remat is not None and not context.usage.has_called("remat")
    if whole:
        context = context.with_options(remat_whole=True)
    if not isinstance(config.remat, str):
        if whole:
            last, whole = task_step.trace(context), False  # names are met only where something is computed again
        for key, names in (("save", config.remat.save), ("offload", config.remat.offload)):
            check_names(key, names, context.usage.marks, task_step.what)
    return context, None if whole else last
