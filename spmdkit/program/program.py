"""`Program`: a task and a config on a mesh. Abstract values first, arrays last.

config -> mesh -> shapes of the state -> layout -> batch -> form of the step -> compiled step -> arrays. `train`,
`eval`, `plan`, `verify` and user-defined loops all use the same `Program`. Nothing is allocated before all of these are
consistent, and errors are raised in this order.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit import compat, data
from spmdkit.communication.reducers.base import Reducer
from spmdkit.communication.reducers.sum import make as plain_sum
from spmdkit.compat import callbacks, convolutions
from spmdkit.compat.user_mesh import ignores_user_settings
from spmdkit.config import Config, replace_keys
from spmdkit.errors import ConfigError, UserCodeError
from spmdkit.foundation import plugins
from spmdkit.foundation.trees import abstract, check_names, named_leaves, replace_leaves, summary
from spmdkit.mesh import mesh
from spmdkit.program import auto, compile_log, compiler, memory, packing_check, padding_check, parameter_groups, phases
from spmdkit.program import groups as program_groups
from spmdkit.program.choose_lowering import choose_form
from spmdkit.program.eval_params import eval_params_of
from spmdkit.program.evaluation import Evaluator, SetEvaluator, check_best
from spmdkit.program.explain import explain
from spmdkit.program.feeds import Feeds, check_next_examples, check_rows, end_notes, limited, open_feeds, with_streams
from spmdkit.program.init_from import InitFrom
from spmdkit.program.init_state import abstract_init, check_jit, check_precision, input_notes, with_user_state
from spmdkit.program.phases import Phase
from spmdkit.program.row_table import Row, plain_draws, row_table, row_warnings
from spmdkit.program.state_creation import StateCreation
from spmdkit.program.state_layout import place_state, state_groups, to_device
from spmdkit.program.step_context import step_context
from spmdkit.program.task import Task
from spmdkit.program.task_step import TaskStep
from spmdkit.program.xla_defects import check_dtypes
from spmdkit.step import finite_check, leaf_roles, lost_updates, reducer_state, state, trace_context
from spmdkit.step.dataflow.analysis import Usage
from spmdkit.step.groups import groups
from spmdkit.step.metrics.base import is_metric
from spmdkit.step.model_state import agreement
from spmdkit.step.rng import abstract_key
from spmdkit.step.state import TrainState, check_not_donated, without_aliases
from spmdkit.step.step import Batch, StepChecks

WITHOUT_DATA = (
    "Task.train_data is missing, so the batch is int32[rows], the numbers of its examples. For data pass a mapping of "
    "arrays, a source or a grain dataset."
)


class Program:
    """A task on a mesh, ready to run.

    Attributes:
        config, task, mesh: the resolved config, the user's task, the device mesh.
        layout: placement of every leaf of the train state, with the reason.
        form: the form of the compiled step: `plain`, `mapped` or `manual` (see `spmdkit.step.lowering`).
        notes: notes for the user; skipped_rows: unreadable rows of training and of the evaluation.
        state_reduction: reduction of model state leaves over replicas, as declared by the task.
        compile_log: lines about rematerialization that XLA logged while it compiled the step.
        checks: of the last step, on the devices; feed: batches of training; limit: loss limit of `on_spike`.
        may_be_donated: whether a step checks that its state has not been donated.
        probe_padding: whether the first step and evaluation check that padding rows do not count.
        argument_names: path of a leaf -> its name in a compiled step that does not use spmdkit.
        seconds_at_peak: the time of the model's matrix products of a step at the peak of the devices; None before a run
            has written its plan.
    """

    argument_names: Mapping[str, str] = {}
    seconds_at_peak: float | None = None

    @ignores_user_settings
    def __init__(self, config: Config, task: Task, devices: Sequence[jax.Device], probe_padding: bool = True):
        check_jit()
        self.config = config
        self.probe_padding, self._probed = probe_padding, False
        self.compile_log, self.checks = list[str](), StepChecks(None, None)
        self.may_be_donated = devices[0].platform == "cpu"
        self._devices = devices
        compat.lay_out_ffts()
        convolutions.split_grouped_convolutions()
        callbacks.run_callbacks_on_meshes(mesh.REPLICA_AXES)
        check_precision(config)
        if not isinstance(config.microbatches, int) or auto.is_auto(config):
            raise ConfigError(
                "microbatches: auto and remat: auto are chosen when a program is opened. Use sk.build(config), or "
                "set numbers."
            )
        self.microbatches, self.zero = config.microbatches, config.layout.zero
        mesh.check_processes(config.mesh.sizes(), devices)
        self.sizes = mesh.resolve(config.mesh.sizes(), len(devices), mesh.slices(devices))
        self.mesh = mesh.make_mesh(self.sizes, devices)
        self.task = task = with_streams(with_user_state(task, config, self.mesh), config)
        self.optimizer = program_groups.optimizer_of(config, task)
        traced_init = abstract_init(task, config, self.mesh)
        self._init, abstract_params, abstract_model_state, self._annotations, self.notes = traced_init
        self._variables = state.Initial(abstract_params, abstract_model_state)
        self.stateful = abstract_model_state is not None
        task.check_functions(self.stateful)
        self.groups = program_groups.groups_of(config, self.sizes, task.is_manual)
        self._stepped: tuple[Any, int] | None = None
        self._returned: weakref.ref[TrainState] | None = None
        self._state_groups = state_groups(config, self.stateful, task.is_manual, self.num_replicas)
        self.state_reduction = agreement.declared_reductions(task.state_reduction, abstract_model_state)
        self._abstract_state = jax.eval_shape(self._create_one, abstract_key())  # one copy
        self._roles, self._unread = self._leaf_roles(abstract_params)
        self._eval_params = eval_params_of(task, self._abstract_state)
        check_names(self._abstract_state, "the state")
        check_dtypes(self._abstract_state, self._devices)
        self._place_state(abstract_params)
        self._open_data()
        self._num_tokens: dict[tuple[Any, ...], int] = {}
        self.num_tokens(self.abstract_batch)
        feeds = Feeds(self.feed, self._eval_feeds)
        self.notes += check_rows(config, task, self.mesh, self.sizes, feeds)
        self._choose_form()
        self._add_notes()

    def __repr__(self) -> str:
        on = f"mesh {mesh.describe_mesh(self.sizes)} on {len(self._devices)} x {self._devices[0].platform}"
        head = f"Program: {on}, {self.form} form\n  params: {summary(self.abstract_state.params)}\n"
        return f"{head}  .init() .batches() .step(state, batch) .eval(state) .layout .explain()"

    # ---- abstract

    def _place_state(self, abstract_params: Any) -> None:
        config, task = self.config, self.task
        self._single = place_state(
            config, task.rules, self._annotations, self._abstract_state, abstract_params, self.mesh, self.sizes
        )
        self._placed = self._single  # before the reducer's state is added
        if self.groups is not None:
            is_frozen = task.train_step is None  # a train_step may update them itself
            frozen = [path for path, role in self._roles.items() if role == "frozen" and is_frozen]
            self.groups = dataclasses.replace(self.groups, frozen=frozenset(frozen))
            self._placed = program_groups.place(
                self.groups, self._single, abstract_params, self.mesh, self.sizes, plugins.split(config.sync)[0]
            )

    def _add_notes(self) -> None:
        """Adds what a user should know before the first step. Raises ConfigError if the evaluation cannot be traced."""
        config = self.config
        trained = [self.abstract_batch] if self._step_context.usage.has_called("value_and_grad") else []
        evaluated = [feed.abstract() for feed in self._eval_feeds.values()]
        self.notes += input_notes(config, [batch.examples for batch in (*trained, *evaluated)])
        if self.has_eval:  # traced now: otherwise a mistake would end a run at its first evaluation
            if self.evaluator.note:
                self.notes.append(self.evaluator.note)
            check_best(config.checkpoint, self.evaluator.names)
            self.notes += end_notes(config, self._eval_feeds)
        mixing = self.task.row_mixing or config.row_mixing
        what, reducing = self._task_step.what, self.num_replicas if config.model_state == "global" else 1
        if self.task.train_data is None and self.num_replicas * self.microbatches > 1:
            self.notes += plain_draws(self.row_usages, what)
        self.notes += row_warnings(self.row_usages, what, mixing, self.microbatches, reducing, self._roles)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes of the replicas; with ZeRO 1 and 2 they include `fsdp`."""
        return ("data",) if self.zero == 3 else ("data", "fsdp")

    @property
    def reducer(self) -> Reducer:
        """The reducer of the gradients."""
        return self._step_context.options.reducer

    @property
    def separate_state_reduction(self) -> dict[str, str] | None:
        """The reductions of model state that exists [groups, ...], for groups of replicas; None for one copy."""
        has_one_copy = self.groups is None and self._state_groups is None
        return None if has_one_copy else dict(self.state_reduction)

    @property
    def num_replicas(self) -> int:
        """The number of replicas that compute a gradient."""
        return mesh.count(self.sizes, ("replica", *self.data_axes))

    @property
    def batch_shards(self) -> int:
        """The number of shards of a batch."""
        return mesh.count(self.sizes, mesh.BATCH_AXES)

    def _create_one(self, key: jax.Array, loaded: Mapping[str, jax.Array] | None = None) -> TrainState:
        """Returns one copy of the state before the first step, without the reducer's state.

        Args:
            loaded: path -> parameter, instead of that of `init`.
        """
        variables = self._init(key)
        params = replace_leaves(variables.params, "params", loaded or {})
        model_state = variables.state
        if (num := self._state_groups) is not None:
            model_state = jax.tree.map(lambda x: jnp.stack([x] * num), model_state)
        options = self.config.seed, self.config.ema
        return state.create(params, model_state, self.optimizer, *options, variables.opt_state)

    def _open_data(self) -> None:
        self.feed, self._eval_feeds = open_feeds(self.config, self.task, self.mesh, self.sizes)
        self.schedule = self.feed.schedule
        if self.config.epochs is not None:
            self.config = replace_keys(self.config, {"steps": self.schedule.steps_of(self.config.epochs)})
        self.abstract_batch, self.limit = limited(self.config, self.feed.abstract(), self.mesh)
        self.skipped_rows = [feed.skipped_rows for feed in (self.feed, *list(self._eval_feeds.values())[:1])]

    # ---- the step

    def _context(self) -> trace_context.Context:
        return step_context(
            self.config,
            self.mesh,
            self.sizes,
            data_axes=self.data_axes,
            rules=self._annotations.rules,
            placements=self._placed.placements,
            state_groups=self._state_groups,
            state_reduction=self.state_reduction,
            roles=self._roles,
            unread=self._unread,
        )

    def _leaf_roles(self, params: Any) -> tuple[leaf_roles.Roles, frozenset[str]]:
        """Returns (roles of the parameters, those with a gradient that the optimizer does not read). Under the default
        step, which uses the gradient for nothing else, the latter are frozen."""
        declared = parameter_groups.declared(self.config, self.task)
        roles = leaf_roles.declared_roles(declared, params, functools.partial(parameter_groups.where, self.config))
        unread = leaf_roles.unread_gradients(self.optimizer, params, self._abstract_state.opt_state) - roles.keys()
        if self.task.train_step is None and len(unread) + len(roles) < len(named_leaves(params)):
            roles |= dict.fromkeys(sorted(unread), "frozen")
        return roles, frozenset(unread)

    def _choose_form(self) -> None:
        task_step = TaskStep(
            task=self.task,
            config=self.config,
            mesh=self.mesh,
            sizes=self.sizes,
            stateful=self.stateful,
            groups=self.groups,
            state=self._placed,
            batch=self.abstract_batch,
            always_full=self.schedule.always_full,
            ends=self.feed.ends,
        )
        try:
            chosen = choose_form(task_step, self._context(), self.num_replicas, self.probe_padding)
        except (ConfigError, UserCodeError) as error:
            if self.task.train_data is not None:
                check_next_examples(self.feed)
                raise
            raise type(error)(f"{error} {WITHOUT_DATA}") from error.__cause__
        self._task_step, self._step_context, self._traced, self._refused = chosen
        self._shapes, self._by_shapes = _shapes(self.abstract_batch), dict[tuple[Any, ...], Program]()
        self.form = self._step_context.sharding.form
        self._validate_first = reducer_state.FirstStepValidator(self._step_context)
        self.layout, self.state_sharding, self.abstract_state, _ = self._task_step.state

    @functools.cached_property
    @ignores_user_settings
    def traced(self) -> jax.stages.Traced:
        """The step traced on its shardings, with its jaxpr; can be lowered."""
        return self._traced or self._task_step.trace(self._step_context.for_new_trace())

    @functools.cached_property
    @ignores_user_settings
    def lowered(self) -> jax.stages.Lowered:
        """The step as passed to the compiler."""
        return self.traced.lower()  # type: ignore[no-any-return]

    @functools.cached_property
    @ignores_user_settings
    def compiled(self) -> jax.stages.Compiled:
        """The compiled step `(state, batch) -> (state, metrics, checks)`. The state is donated."""
        with compile_log.capture() as self.compile_log:
            return self._compile(self.__dict__.pop("lowered", None) or self.traced.lower())

    def _compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        return compiler.compile(lowered, self._devices, self.config.compiler_options, self.config.deterministic)

    @functools.cached_property
    def input_bytes(self) -> memory.InputBytes:
        """The inputs of the step, the state and a batch, in bytes per device."""
        return memory.input_bytes(self.layout, self.mesh, self.abstract_batch)

    @functools.cached_property
    def step_bytes(self) -> memory.StepBytes:
        """The memory of one device while the step runs. Compiles the step if necessary; a step that the compiler
        rejects for its size is recorded as `refused`."""
        return memory.step_bytes(lambda: self.compiled, self.input_bytes, self._devices[0].platform)

    def with_step(self, changes: Mapping[str, Any]) -> Program:
        """Returns this program with changed `microbatches` or `remat`: only the step is traced again, everything else
        is shared."""
        assert changes.keys() <= {"microbatches", "remat"}, f"{sorted(changes)} change more than the step"
        other = copy.copy(self)
        for name in ("traced", "lowered", "compiled", "phases", "step_bytes", "initial"):
            other.__dict__.pop(name, None)
        other.config = replace_keys(self.config, changes)
        assert isinstance(other.config.microbatches, int)
        other.microbatches, other.notes, other.compile_log = other.config.microbatches, [*self.notes], []
        other._open_data()
        other._choose_form()
        return other

    def _of_shapes(self, batch: Batch) -> Program:
        """Returns the program of the shapes of a batch: this one, or one of a custom loop with other lengths, traced
        once."""
        shapes = _shapes(batch)
        if shapes == self._shapes:
            return self
        if shapes not in self._by_shapes:
            other = copy.copy(self)
            for name in ("traced", "lowered", "compiled", "phases", "step_bytes", "input_bytes"):
                other.__dict__.pop(name, None)
            sharded: Callable[[Any], Any] = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            other.abstract_batch, other.compile_log = jax.tree.map(sharded, batch), []
            other._choose_form()
            self._by_shapes[shapes] = other
        return self._by_shapes[shapes]

    def other_shapes(self) -> dict[str, Program]:
        """Returns the programs of a step with other batch sizes or buckets of lengths, by name."""
        limited: Callable[[Batch], Batch] = lambda batch: dataclasses.replace(batch, limit=self.abstract_batch.limit)
        return {name: self._of_shapes(limited(batch)) for name, batch in self.feed.other_shapes().items()}

    @property
    def computes_twice(self) -> bool:
        """Whether a step computes more than the model: with remat, or pipeline stages, which idle and recompute."""
        return self.config.remat != "none" or self.sizes["pipeline"] > 1

    def traced_once(self) -> jax.stages.Traced:
        """Returns the step traced without recomputation: the model's arithmetic, with all stages on one device."""
        context = self._step_context.with_options(remat=None, remat_whole=False).for_new_trace()
        if self.sizes["pipeline"] > 1:
            ones = dict.fromkeys(self.sizes, 1)
            context = context.with_sharding(form="plain", mesh=mesh.make_mesh(ones, self._devices), sizes=ones)
        return jax.jit(self._task_step.function(context)).trace(abstract(self.abstract_state), self.abstract_batch)

    @property
    def leaf_notes(self) -> dict[str, str]:
        """Path -> what `groups`, `train_only`, `Task.frozen` and `Task.overwritten` set for a parameter."""
        return parameter_groups.notes(self.config, self._roles, self._variables.params)

    @property
    def row_usages(self) -> list[Usage]:
        """How rows enter each loss, metric and leaf of the model state."""
        trained = [usage for usages in self._step_context.analyses.values() for usage in usages]
        return [*trained, *(self.evaluator.row_usages if self.has_eval else ())]

    @property
    def row_table(self) -> list[Row]:
        """The table of `row_usages`: what happens to each of them over replicas, microbatches and padding."""
        return row_table(self.row_usages, self.state_reduction, self.microbatches, not self.schedule.always_full)

    def explain(self) -> str:
        """Returns everything that was applied to the step, in order, with reasons: one line each. Compiles nothing."""
        return explain(self._task_step, self._step_context, self._refused, self.row_table, self.notes)

    @ignores_user_settings
    def step(self, state: TrainState, batch: Batch | Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Returns the state after one step, and its metrics as device scalars. The input state is donated.

        Leaves of the state that share memory are copied first. `batch` is an item of `batches` or a result of `put`.
        Does not wait for the device, except the first time: for short batches, groups that train separately, a
        reducer's warm-up or validation. A batch of other lengths than `train_data` is traced and compiled once.

        Raises:
            ConfigError: padding rows of a short batch would count, packed documents are not independent, or the reducer
                rejects the first step.
        """
        if self.may_be_donated:
            check_not_donated(state, "program.step")
        if self._returned is None or self._returned() is not state:  # from `init`, a checkpoint or user code
            state = without_aliases(state)
        batch = (batch if isinstance(batch, Batch) else self.put(batch)).limited(self.limit)
        if (other := self._of_shapes(batch)) is not self:
            state, metrics = other.step(state, batch)
            self.checks, self._stepped, self._returned = other.checks, other._stepped, other._returned
            return state, metrics
        if self.probe_padding and not self._probed:
            if batch.mask is not None:
                self.check_padding(state, batch)
            if packing_check.packed_features(batch) and "loss" in self.traced.out_info[1]:
                loss = lambda changed: self._forward(state, changed)["metric"]["loss"]
                packing_check.check(loss, batch, self._task_step.what)
            self._probed = True
            vars(self).pop("_forward", None)  # releases its memory
        number, due = 0, list[tuple[bool, jax.stages.Compiled]]()
        if self.phases:
            last = self._stepped if self._stepped is not None and self._stepped[0] is state.step else None
            number = 1 + (int(state.step) if last is None else last[1])
            compiled = [(p, p.compiled) for p in self.phases]  # before the first step, so that no later step waits
            due = [(p.in_place, program) for p, program in compiled if p.runs(number)]
        step = next((program for in_its_place, program in due if in_its_place), self.compiled)
        state, metrics, self.checks = step(state, batch)
        self._validate_first(metrics, self.metrics)
        for program in (program for in_its_place, program in due if not in_its_place):
            state = program(state)
        self._stepped, self._returned = (state.step, number), weakref.ref(state)
        return state, metrics

    def gradient_norm(self) -> float | None:
        """Returns the norm of the gradient that the optimizer received in the last step, before `clip_norm`; the mean
        over groups that train separately. None for a step that passes it none, or in a loop. Waits for the devices; all
        processes call it."""
        if (squares := self.checks.squares) is None:
            return None
        return finite_check.gradient_norm(self.mesh, squares, 1 if self.groups is None else self.groups.num)

    def num_tokens(self, batch: Batch) -> int:
        """Returns the number of tokens of a global batch by `Task.tokens`; 0 without it."""
        if self.task.tokens is None:
            return 0
        shapes = _shapes(batch)
        if shapes not in self._num_tokens:
            self._num_tokens[shapes] = self.task.count_tokens(batch.examples)
        return self._num_tokens[shapes]

    @property
    def narrow_leaves(self) -> list[str]:
        """The parameters with updates that `checks.sizes` measures, in its order."""
        return lost_updates.narrow_leaves(self._roles, self.abstract_state.params)

    @property
    def warmup(self) -> int:
        """The last step that uses `sum` instead of the reducer; 0 if nothing is reduced."""
        return self.reducer.warmup if self._step_context.sharding.num_replicas > 1 else 0

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The programs of a run other than the step, those that replace a step first."""
        warm, checks = (self.warmup, lambda: self.lowered_by(plain_sum())), lambda: self.traced.out_info[2]
        whole = self._single, self._context, self.num_replicas, checks, self._step_context.for_new_trace
        return phases.phases_of(self._task_step, self._compile, warm, whole)

    def compiled_by(self, reducer: Reducer) -> jax.stages.Compiled:
        """Returns the step compiled with another reducer."""
        return self._compile(self.lowered_by(reducer))

    def lowered_by(self, reducer: Reducer) -> jax.stages.Lowered:
        """Returns the step with another reducer, as passed to the compiler."""
        context = self._step_context.with_options(reducer=reducer).for_new_trace()
        return self._task_step.trace(context).lower()  # type: ignore[no-any-return]

    @functools.cached_property
    def _add_metrics(self) -> Any:
        return jax.jit(groups.merged_metrics, out_shardings=NamedSharding(self.mesh, PartitionSpec()))

    def metrics(self, metrics: Mapping[str, Any]) -> Mapping[str, jax.Array]:
        """Returns the metrics of a step as device scalars over all groups; unchanged if replicas are synchronous.

        A separate program on all processes: call it at the steps at which metrics are read.
        """
        of_groups = self.groups is not None and any(map(is_metric, metrics.values()))
        return self._add_metrics(dict(metrics)) if of_groups else metrics

    def _one_copy(self, current: TrainState) -> TrainState:
        """Returns the state to evaluate: on the devices, one copy for all groups."""
        current = to_device(self.layout, self.mesh, current)
        return current if self.groups is None else groups.merged_state(self.groups, current, self.state_reduction)

    def check_padding(self, state: TrainState, batch: Batch) -> None:
        """Rejects a step with results that depend on the contents of padding rows; see `spmdkit.program.padding_check`.
        Waits for the device."""
        whole, grid = NamedSharding(self.mesh, PartitionSpec()), self.feed.grid(len(jax.tree.leaves(batch.examples)[0]))
        if effects := padding_check.changes(functools.partial(self._forward, state), batch, grid, whole):
            raise padding_check.refused_step(effects, self._task_step.what, self.feed.ends)

    @functools.cached_property
    def _forward(self) -> jax.stages.Compiled:
        whole, shapes = NamedSharding(self.mesh, PartitionSpec()), (self.abstract_state, self.abstract_batch)
        return self._compile(padding_check.lowered_forward(self.traced, *shapes, self.state_sharding, whole))

    # ---- arrays

    @functools.cached_property
    def _leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The leaves of one copy of the state that `init_from` can load."""
        one = self._abstract_state
        parts = {"params": self._variables.params, "model_state": self._variables.state}
        return dict(named_leaves(parts | {"opt_state": one.opt_state, "ema": one.ema}))

    @functools.cached_property
    def init_from(self) -> InitFrom | None:
        """The leaves that the config's `init_from` loads, matched with the state; None without it."""
        return None if self.config.init_from is None else InitFrom(self.config, self._leaves)

    @functools.cached_property
    def initial(self) -> StateCreation:
        """The state before the first step."""
        source = self.config.seed, self.init_from, self._create_one, self.groups
        return StateCreation(*source, self._leaves, self.abstract_state, self._compile)

    def init(self) -> TrainState:
        """Returns the state before the first step: leaves of the config's `init_from`, all others of the task's `init`.
        Each leaf is created with its sharding. Those of `init` are bitwise the same on every mesh."""
        return self.initial.create()

    @ignores_user_settings
    def restore(self, step: int | str | None = None, what: str | None = None) -> Any:
        """Returns the state of a checkpoint in the config's run directory, on the mesh of this program.

        Args:
            step: a number, `best`, or None for the newest.
            what: only `params`, `opt_state`, `model_state` or `ema`.

        Raises:
            CheckpointError: the step does not exist, is damaged, or is of a different model.
        """
        return importlib.import_module("spmdkit.program.restore").restore_from_run(self, step, what)

    def batches(self, start: int = 1, stop: int | None = None) -> Iterator[tuple[int, Batch]]:
        """Yields `(step, batch)` for steps `start` to `stop` (inclusive, default: the last), prefetched to the
        devices."""
        with self.stream(start, stop) as stream:
            yield from ((number, batch) for number, batch, _ in stream)

    def stream(self, start: int = 1, stop: int | None = None) -> data.DeviceBatches:
        """Returns an iterator of `(step, batch, wait_s)`; `wait_s`: seconds that the caller waited for input."""
        return self.feed.stream(start, self.config.num_steps if stop is None else stop)

    def skip_batches(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Skips batches in addition to those of the config: numbers (first, last), counted as if none were skipped."""
        skipped = data.merge_ranges([*self.config.data.skipped_ranges(), *ranges])
        self.schedule = self.feed.schedule = self.schedule.with_skipped(skipped)

    def continue_sizes(self, before: data.BatchSizes, done: int) -> None:
        """Sets the batch sizes to those of a run for its first `done` batches, and from then on to the config's."""
        self.schedule = self.feed.schedule = data.continue_sizes(self.schedule, before, done, self.config.batch_sizes)

    def put(self, examples: Any, mask: Any = None) -> Batch:
        """Returns a batch on the devices from global host arrays (the same on every process), for a loop with custom
        data."""
        return self.feed.put(examples, mask)

    # ---- evaluation

    @property
    def has_eval(self) -> bool:
        """Whether the task has evaluation data."""
        return bool(self._eval_feeds)

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """The compiled evaluation; raises ConfigError if the task has no data for it, or its function does not return
        means."""
        if not self._eval_feeds:
            raise ConfigError("evaluation needs data: the task has no eval_data. Pass Task(eval_data=...).")
        context = self._step_context
        if self.groups is not None:  # over all replicas, in the form that binds the names of their axes
            context = context.with_sharding(sizes=self.sizes, form="mapped")
        make = lambda feed: SetEvaluator(
            self.task,
            feed,
            context,
            self.abstract_state,
            params_of=self._params_to_evaluate,
            seed=self.config.seed,
            to_device=self._one_copy,
            compile=self._compile,
            probe_padding=self.probe_padding,
        )
        return Evaluator(self._eval_feeds, make)

    def _params_to_evaluate(self, current: TrainState) -> Any:
        """Returns the parameters to evaluate, of one copy of the state on the devices."""
        if self.config.eval.params == "ema":
            ema = current.ema
            return ema.slow if isinstance(ema, optax.LookaheadParams) else ema
        return current.params if self._eval_params is None else self._eval_params(current)

    @property
    def has_eval_params(self) -> bool:
        """Whether other parameters than those of the state are evaluated and exported: of the task or its optimizer."""
        return self._eval_params is not None

    @functools.cached_property
    def _compiled_eval_params(self) -> Any:
        return jax.jit(lambda current: self._params_to_evaluate(self._one_copy(current)))

    @ignores_user_settings
    def eval_params(self, current: TrainState) -> Any:
        """Returns the parameters that are evaluated, on the devices: of `eval.params`, `Task.eval_params` or the
        optimizer; one copy for all groups."""
        check_not_donated(current, "program.eval_params")
        return self._compiled_eval_params(current)

    @ignores_user_settings
    def eval(self, current: TrainState, name: str | None = None) -> dict[str, Any]:
        """Returns the metrics over the full evaluation set, of any size: numbers, and arrays of `sk.bincount`. Waits
        for the device. `name`: one of several sets; None: all."""
        check_not_donated(current, "program.eval")
        return self.evaluator(current, name)

    def non_finite_leaf(self, current: TrainState) -> str | None:
        """Returns the path of the first leaf of the state with a NaN or an infinity, or None. Waits for the device."""
        return finite_check.non_finite_leaf(self.mesh, current)

    def all_finite(self, current: TrainState) -> bool:
        """Returns whether all leaves of the state are finite, the same on every process. Waits for the device."""
        return finite_check.all_finite(self.mesh, current)


def _shapes(batch: Batch) -> tuple[Any, ...]:
    return tuple(x.shape for x in jax.tree.leaves(batch.examples))
