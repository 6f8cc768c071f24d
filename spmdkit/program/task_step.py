"""`TaskStep`: the step of a task on a mesh, as a function and traced, in the form of a context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdkit.config import Config
from spmdkit.mesh import mesh
from spmdkit.program.state_layout import StateLayout, to_device
from spmdkit.program.task import Task
from spmdkit.step import step
from spmdkit.step.checks.implicit_psum import refuse_summed
from spmdkit.step.checks.reductions import check_reductions
from spmdkit.step.checks.replica_agreement import check_agreement
from spmdkit.step.explicit import explicit_step
from spmdkit.step.groups import groups
from spmdkit.step.groups.groups import Groups
from spmdkit.step.groups.step import group_step
from spmdkit.step.named_axis import map_step
from spmdkit.step.state import TrainState
from spmdkit.step.step import Batch
from spmdkit.step.trace_context import Context


@dataclass(frozen=True)
class TaskStep:
    """The user's step and its inputs.

    Attributes:
        sizes: axis sizes of the full mesh; those of the context are of one group if groups train separately.
        stateful: whether `init` returns model state.
        groups: groups that train separately, or None.
        state: the layout of the train state.
        batch: the abstract batch, with its shardings.
        always_full: whether every batch has all its rows.
        ends: whether the data end: a batch without rows leaves the state unchanged.
    """

    task: Task
    config: Config
    mesh: Mesh
    sizes: Mapping[str, int]
    stateful: bool
    groups: Groups | None
    state: StateLayout
    batch: Batch
    always_full: bool
    ends: bool = False

    @property
    def what(self) -> str:
        """The name of the user's function in messages."""
        return "train_step" if self.task.train_step is not None else "loss_fn"

    def function(self, context: Context, typed: bool = True) -> Any:
        """Returns `(state, batch) -> (state, metrics, checks)`.

        Args:
            typed: False omits the types of values that vary over replicas (`view: replica`).
        """
        train_step = self.task.train_step or step.default_step(self.task.loss_fn, self.stateful)  # type: ignore[arg-type]
        if self.task.axis_name is not None:
            train_step = map_step(train_step, self.task.axis_name)
        if context.sharding.explicit:
            train_step = explicit_step(train_step, self.state.sharding)
        train_step = step.with_hooks(train_step, self.task.hooks)
        if self.groups is not None:
            return group_step(train_step, context, self.groups, self.to_device)
        if self.task.is_manual:
            whole = step.replica_step(train_step, context, self.to_device, typed)
        else:
            whole = step.global_step(train_step, context, self.to_device)
        return step.unchanged_without_rows(whole, self.to_device) if self.ends else whole

    def to_device(self, current: TrainState) -> TrainState:
        """Copies the leaves in host memory to the devices, inside the step."""
        return to_device(self.state.table, self.mesh, current)

    def shapes(self, context: Context, batch: Batch | None = None) -> Any:
        """Returns the abstract result of the step."""
        return jax.eval_shape(self.function(context), self.state.abstract, batch or self.batch)

    def trace(self, context: Context) -> jax.stages.Traced:
        """Returns the step traced on its shardings; raises ConfigError if replicas diverge, or groups communicate."""
        of_metrics = PartitionSpec() if self.groups is None else PartitionSpec(self.groups.axes)
        out_shardings = (self.state.sharding, NamedSharding(self.mesh, of_metrics), None)
        jitted = jax.jit(self.function(context), out_shardings=out_shardings, donate_argnums=0)
        arguments = (self.state.abstract, self.batch)
        traced = jitted.trace(*arguments)
        if self.task.is_manual:
            replica_axes = [a for a in mesh.REPLICA_AXES if self.sizes[a] > 1]
            check_reductions(traced.jaxpr, replica_axes)
            check_agreement(traced.jaxpr, replica_axes)
            untyped = lambda: jax.make_jaxpr(self.function(context.for_new_trace(), typed=False))(*arguments)
            refuse_summed("train_step", traced.jaxpr, untyped, replica_axes)
        if self.groups is not None:
            groups.check_alone(self.groups, traced.jaxpr, self.what)
        return traced
