"""How a step is compiled: the first form of the mesh's in which the user's functions can be traced, and what it needs to be kept.

forms of the mesh -> the first that is traced -> the reducer's place in the train state -> what the step has used -> remat
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from spmdkit import kinds
from spmdkit.errors import SpmdkitError
from spmdkit.ops.remat import check_names
from spmdkit.program import grouping, padding
from spmdkit.program.state_layout import StateLayout, laid_out
from spmdkit.program.step_record import forms_of
from spmdkit.program.task_step import TaskStep
from spmdkit.program.unused import check_used
from spmdkit.program.xla_defects import check_pools
from spmdkit.reducers.base import Reducer, stateless
from spmdkit.reducers.sum import make as plain_sum
from spmdkit.step import reducer_state, scope
from spmdkit.user_code import call_user


class Chosen(NamedTuple):
    """A step whose form is chosen.

    Attributes:
        record: of the step.
        traced: the step of that record, where it was traced last; else None.
        state: where the train state lives, with what the reducer keeps.
        kept: what the reducer keeps, abstract: `TrainState.reducer`.
        refused: forms that were tried before, and what each said: as text, since an error keeps all that its frames hold.
    """

    record: scope.Context
    traced: jax.stages.Traced | None
    state: StateLayout
    kept: tuple[Any, ...]
    refused: tuple[tuple[scope.Form, str], ...]


def choose_form(step: TaskStep, record: scope.Context, num_replicas: int, probe_padding: bool) -> Chosen:
    """Returns the step in the first form that it can be traced in.

    Args:
        record: of the config; its form is not chosen yet.
        num_replicas: on the whole mesh.
        probe_padding: whether to look if padding rows count, where batches can be short.

    Raises:
        ConfigError, UserCodeError: no form takes the user's functions, or they do not use what the config asks for.
    """
    reducer = record.chosen.reducer
    forms = forms_of(step.task.view, step.sizes, num_replicas)
    if step.groups is not None:
        record = record.cutting(sizes=step.groups.inner(step.sizes))
        forms = ("plain",) if record.cuts.num_replicas == 1 else ("mapped",)
    keeps = reducer.init is not stateless and record.cuts.num_replicas > 1
    if keeps and step.groups is not None:
        grouping.check_reducer(step.groups, step.config)
    if keeps:  # the form and the calls are found without it
        record = record.choosing(reducer=plain_sum())
    record, traced, refused = _first_traced(step, [record.cutting(form=form).anew() for form in forms])
    reducer_state.check_effect(kinds.split(step.config.reducer)[0], reducer, record, step.sizes, step.what)
    kept: tuple[Any, ...] = ()
    if keeps:
        step, record, kept = _with_state_of(step, reducer, record)
        traced = call_user(functools.partial(step.trace, record), step.what)
    settled, last = _settle(step, record, traced, probe_padding)
    return Chosen(settled, last, step.state, kept, refused)


def _first_traced(
    step: TaskStep, records: Sequence[scope.Context]
) -> tuple[scope.Context, jax.stages.Traced, tuple[tuple[scope.Form, str], ...]]:
    """Returns (the first record in whose form the user's functions can be traced, its trace, what refused those before).

    What one form refuses, another may take: `plain` binds no names of replica axes. If none does, the first error is raised.
    """
    errors = list[SpmdkitError]()
    for record in records:
        try:
            traced = call_user(functools.partial(step.trace, record), step.what)
        except SpmdkitError as error:
            errors.append(error)
            continue
        return record, traced, tuple((r.cuts.form, str(e)) for r, e in zip(records, errors, strict=False))
    raise next((error for error in errors if "unbound axis name" not in str(error)), errors[0])


def _with_state_of(
    step: TaskStep, reducer: Reducer, record: scope.Context
) -> tuple[TaskStep, scope.Context, tuple[Any, ...]]:
    """Returns (the step, its record, what is kept) with a reducer that keeps something, for which the train state gets its place."""
    gradients: list[Any] = []
    call_user(lambda: step.shapes(record, gradients=gradients), step.what)
    record = record.choosing(reducer=reducer).anew()
    kept, table = reducer_state.shapes(reducer, gradients, record)
    placed = step.state
    abstract = placed.abstract.replace(reducer=kept)
    state = laid_out([*placed.table, *table], abstract, step.mesh, placed.placements)
    return dataclasses.replace(step, state=state), record, kept


def _settle(
    step: TaskStep, record: scope.Context, traced: jax.stages.Traced, probe_padding: bool
) -> tuple[scope.Context, jax.stages.Traced | None]:
    """Checks what the user's step has used, and wraps the whole loss where it asks for no `sk.remat` itself."""
    config, last = step.config, traced
    check_used(config, record, step.state.table, step.always_full, step.what)
    check_pools(traced.jaxpr, step.sizes, step.what)
    if probe_padding and not step.always_full:
        padding.check_first_dims(record, step.shapes, step.batch, step.what)
    whole = record.chosen.remat is not None and not record.noticed.has_called("remat")
    if whole:
        record = record.choosing(remat_whole=True)
    if not isinstance(config.remat, str):
        if whole:
            last, whole = step.trace(record), False  # names are met only where something is computed again
        for key, names in (("save", config.remat.save), ("offload", config.remat.offload)):
            check_names(key, names, record.noticed.marks, step.what)
    return record, None if whole else last
