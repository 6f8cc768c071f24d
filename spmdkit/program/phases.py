"""The programs of a run other than its step: the reducer's warm-up, the synchronous steps before groups train
separately, and the averages over groups."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.foundation.trees import named_leaves
from spmdkit.program.choose_lowering import choose_form
from spmdkit.program.state_layout import StateLayout
from spmdkit.program.task_step import TaskStep
from spmdkit.step.groups.groups import agreed_state, mean, mean_with_reducer
from spmdkit.step.groups.step import synchronous_step
from spmdkit.step.state import TrainState
from spmdkit.step.trace_context import Context

Lower = Callable[[], jax.stages.Lowered]
Compile = Callable[[jax.stages.Lowered], jax.stages.Compiled]


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """A program of a run other than its step; `name`: its name in a plan. It runs every `every` steps from `first` to
    `until` (None: no end): instead of the step if `in_place`, otherwise after the step."""

    name: str
    lower: Lower
    compile: Compile
    every: int = 1
    in_place: bool = False
    first: int = 1
    until: int | None = None

    @property
    def lowered(self) -> jax.stages.Lowered:
        """The program as passed to the compiler."""
        return self.lower()

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled program; it donates its state."""
        return self.compile(self.lowered)

    def runs(self, step: int) -> bool:
        """Returns whether the program runs at `step` (instead of it or after it)."""
        ended = self.until is not None and step > self.until
        return step >= self.first and not ended and (step - self.first) % self.every == 0


Whole = tuple[StateLayout, Callable[[], Context], int, Callable[[], Any], Callable[[], Context]]
"""A step of the full mesh: the layout of one copy of its state, its context, the number of replicas; then the
abstract checks of a step of groups, and the context of that step."""


def phases_of(task_step: TaskStep, compile: Compile, warmup: tuple[int, Lower], whole: Whole) -> tuple[Phase, ...]:
    """Returns the programs of a run other than its step, those that replace a step first. `warmup`: the last step of
    the reducer's warm-up, or 0; its program."""
    phase, phases, groups = functools.partial(Phase, compile=compile), list[Phase](), task_step.groups
    if groups is not None and (start := groups.sync.start):
        phases.append(phase("start", lambda: lowered_start(task_step, whole), in_place=True, until=start))
    if warmup[0]:
        phases.append(phase("warmup", warmup[1], in_place=True, until=warmup[0]))
    for number, turn in enumerate(() if groups is None else groups.sync.agreements):
        lower = functools.partial(lowered_beside if turn.overlapped else lowered_agreement, task_step, whole, number)
        first = turn.first + turn.overlapped
        phases.append(phase(turn.name, lower, every=turn.every, in_place=turn.overlapped, first=first))
    return tuple(phases)


def lowered_agreement(task_step: TaskStep, whole: Whole, turn: int) -> jax.stages.Lowered:
    """Returns the program that averages groups, state -> state."""
    agree = _agree(task_step, whole, turn)
    jitted = jax.jit(agree, out_shardings=task_step.state.sharding, donate_argnums=0)
    return jitted.lower(task_step.state.abstract)


def lowered_beside(task_step: TaskStep, whole: Whole, turn: int) -> jax.stages.Lowered:
    """Returns the step of groups with an overlapped average. Both use the state before the step, so that the compiler
    can overlap the communication with the step."""
    agree, step = _agree(task_step, whole, turn), task_step.function(whole[4]())

    def train_step(state: TrainState, batch: Any) -> Any:
        new, metrics, checks = step(state, batch)
        return new.replace(sync=agree(state).sync), metrics, checks

    assert task_step.groups is not None
    of_metrics = NamedSharding(task_step.mesh, PartitionSpec(task_step.groups.axes))
    jitted = jax.jit(train_step, out_shardings=(task_step.state.sharding, of_metrics, None), donate_argnums=0)
    return jitted.lower(task_step.state.abstract, task_step.batch)


def _agree(task_step: TaskStep, whole: Whole, turn: int) -> Callable[[TrainState], TrainState]:
    groups = task_step.groups
    assert groups is not None
    specs = {path: x.sharding.spec for path, x in named_leaves(whole[0].abstract.params)}

    def agreement(current: TrainState) -> TrainState:
        current = task_step.to_device(current)
        reducer = groups.reducer
        average = mean if reducer is None else mean_with_reducer(reducer, groups, specs, task_step.mesh, current.key)
        return agreed_state(groups, current, turn, average)

    return agreement


def lowered_start(task_step: TaskStep, whole: Whole) -> jax.stages.Lowered:
    """Returns the synchronous step of all replicas, on the state of all groups."""
    groups = task_step.groups
    assert groups is not None
    single, context, num_replicas, checks, _ = whole
    of_all = dataclasses.replace(task_step, groups=None, state=single)
    chosen = choose_form(of_all, context(), num_replicas, probe_padding=False)
    step = synchronous_step(of_all.function(chosen.context), groups, single.abstract, checks())

    train_step = lambda state, batch: step(task_step.to_device(state), batch)
    train_step.__name__ = "train_step"  # the name in profiles and in XLA's dumps
    shardings = (task_step.state.sharding, NamedSharding(task_step.mesh, PartitionSpec()), None)
    jitted = jax.jit(train_step, out_shardings=shardings, donate_argnums=0)
    return jitted.lower(task_step.state.abstract, task_step.batch)
