"""`TaskRunner`: prepares the user's task for comparison, and runs it on one mesh at a time.

The preparation does not change the mathematics: `init` returns constants (compiling a random init costs more than a
step), the data are the first rows, a transformation around the optimizer records gradients and updates, small leaves
are sharded too, and the computation uses float32 or float64.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit import data
from spmdkit.checkpoint import Checkpoints
from spmdkit.config import Config, replace_keys
from spmdkit.data.source import ArraySource
from spmdkit.errors import ConfigError, SpmdkitError
from spmdkit.foundation.trees import is_key, named_leaves
from spmdkit.mesh.mesh import count
from spmdkit.program import compiler
from spmdkit.program.feeds import with_streams
from spmdkit.program.init_state import make_optimizer, with_user_state
from spmdkit.program.program import Program
from spmdkit.program.task import Task
from spmdkit.step.model_state import agreement
from spmdkit.step.state import TrainState
from spmdkit.verify.cases import exact_reducer
from spmdkit.verify.probes import COUNT, RecordingState, recording_optimizer, with_constant_init, with_count_metric
from spmdkit.verify.unpadded_reference import Unpadded

NUM_BATCHES = 2
"""Batches on which gradient and update are compared, each from the initial parameters. The second batch is short if
short batches are allowed."""

Tree = dict[str, np.ndarray]


@dataclasses.dataclass
class StepResult:
    """The results of one step from the initial parameters. Trees are path -> array."""

    loss: float
    count: float | None
    metrics: dict[str, float]
    gradient: Tree
    update: Tree
    optimizer: Tree
    state: Tree


@dataclasses.dataclass
class Results:
    """The results of a run, as numbers on the host.

    Attributes:
        batches: single steps, each from the initial parameters.
        losses, metrics, params, model_state: results of the consecutive steps; `metrics` are those of the last step.
        evaluation, restored: None if not requested. `restored` is the largest relative 2-norm error of a leaf after
            saving and restoring a checkpoint, with its path.
        apart: path of the first leaf of the last state that differs bitwise between devices, or None.
        uses: names of the spmdkit functions that the task called.
    """

    batches: list[StepResult]
    losses: list[float]
    metrics: dict[str, float]
    params: Tree
    model_state: Tree
    evaluation: dict[str, float] | None
    restored: tuple[float, str] | None
    apart: str | None
    form: str
    uses: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One configuration in which a task runs.

    Attributes:
        mesh: axis sizes larger than one; empty for one device.
        short: short batches are allowed (`data.drop_remainder: false`), and the second batch is short.
        clip_norm: replaces the config's `clip_norm`.
        plain: reference form: no rematerialization, no offload to the host, reducer `sum`.
        replicas: number of replicas of a per-replica step with `axis_name` on one device, as a `vmap`.
    """

    mesh: Mapping[str, int]
    microbatches: int = 1
    short: bool = False
    clip_norm: float | None = None
    plain: bool = False
    replicas: int = 1


class TaskRunner:
    """A task and its config, prepared.

    Args:
        batch_size: global examples per step; must be divisible by the shards and microbatches of every setting.
        steps: number of consecutive steps.
        dtype: `float32`, or `float64` if JAX has 64-bit types enabled.
    """

    def __init__(self, config: Config, task: Task, batch_size: int, steps: int = 3, dtype: str = "float32"):
        config, task = _without_streams(config, task, NUM_BATCHES * batch_size + batch_size // 4 + 1)
        self.config, self.steps, self.batch_size, self.dtype = config, steps, batch_size, dtype
        converted = with_user_state(task, config)
        self._task = with_constant_init(converted, config, dtype)
        # A user-defined step may read its optimizer's state, or have an optimizer that the program does not know.
        self._watched = True if task.train_step is None else None if converted is task else False
        self._sources = {name: getattr(task, name) for name in ("train_data", "eval_data")}
        self._cut: dict[tuple[str, int], ArraySource] = {}
        self._starts: dict[Any, list[Any]] = {}

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The user's loss if the default step differentiates it, else None."""
        return None if self._task.train_step is not None else self._task.loss_fn

    @property
    def watched(self) -> bool:
        """Whether the optimizer is recorded. It is False for a step that reads the optimizer's state; the change of the
        parameters is then used as gradient and as update."""
        return self._watched is not False

    def replicas(self, mesh: Mapping[str, int]) -> int:
        """Returns the number of replicas on a mesh, if the mathematics of the step depends on it; else 1."""
        axes = ("replica", "data") if self.config.layout.zero == 3 else ("replica", "data", "fsdp")
        return 1 if self._task.axis_name is None else math.prod(mesh.get(axis, 1) for axis in axes)

    @property
    def short(self) -> bool:
        """Whether the config allows short batches."""
        return not self.config.data.drop_remainder

    def program(self, setting: Setting, probe: bool = False, evaluated: bool = True) -> Program:
        """Returns the program of a setting on fake devices.

        Args:
            probe: reject padding rows that count. The reference's check covers all programs.
            evaluated: include the task's evaluation, which costs a trace.
        """
        num_devices = count({**dict.fromkeys(setting.mesh, 1), **setting.mesh}, tuple(setting.mesh))
        config, devices = self._config(setting, num_devices), jax.devices()[:num_devices]
        build: Callable[[bool], Program] = lambda watched: Program(
            config, self._instrumented(setting, evaluated, watched), devices, probe
        )
        if self._watched is None:
            if setting.clip_norm is not None:  # clipping wraps the optimizer's state too
                self.program(dataclasses.replace(setting, clip_norm=None), evaluated=evaluated)
                return self.program(setting, probe, evaluated)
            try:
                program, self._watched = build(True), True
            except SpmdkitError:
                program, self._watched = build(False), False
            return program
        return build(self._watched)

    def _config(self, setting: Setting, num_devices: int) -> Config:
        changes: dict[str, Any] = {
            "mesh": dict(setting.mesh),
            "devices": f"cpu:{num_devices}",
            "microbatches": setting.microbatches,
            "batch_size": self.batch_size,
            "steps": self.steps,
            "precision": {"compute": self.dtype, "params": self.dtype, "reduction": self.dtype},
            "eval.every_steps": None,
            "eval.batch_size": None,
            "checkpoint": None,
            "profile": None,
            "compiler_options": {**compiler.quick_options()},  # the user's options are for the training devices
            # Part of the instrumented optimizer:
            "optimizer": None,
            "learning_rate": None,
            "clip_norm": None,
            "groups": [{"match": x.match, "frozen": x.frozen} for x in self.config.groups if x.frozen is not None],
            "data.bucket_boundaries": None,
            "data.bucket_by": None,
            "data.drop_remainder": self.config.data.drop_remainder and not setting.short,
        }
        changes |= _without_effect(self.config, setting.mesh)
        changes["reducer"] = exact_reducer(self.config)
        changes["sync"] = "every_step"  # other syncs change the mathematics
        if setting.mesh.get("fsdp", 1) > 1 and self.config.layout.fsdp == "auto":
            changes["layout.min_shard_bytes"] = 1
        if self.config.remat == "auto":
            changes["remat"] = "full"  # `auto` would choose none for a small model
        if setting.plain:
            changes |= {"remat": "none", "offload": [], "reducer": "sum"}
            changes |= {"model_state": "global"}
        return replace_keys(self.config, changes)

    def _instrumented(self, setting: Setting, evaluated: bool, watched: bool) -> Task:
        config = self.config
        if setting.clip_norm is not None:
            if not watched:
                raise ConfigError(
                    "the step reads its optimizer's state, so that its gradient, and a norm to clip it to, are not "
                    "known"
                )
            config = replace_keys(config, {"clip_norm": setting.clip_norm})
        optimizer = make_optimizer(config, self._task)
        task = dataclasses.replace(
            self._task,
            optimizer=recording_optimizer(optimizer) if watched else optimizer,
            train_data=self._rows("train_data", self._num_train(setting)),
            eval_data=self._rows("eval_data", self._num_eval()) if evaluated else None,
            row_mixing="allow",  # it compares the meshes itself
        )
        if setting.replicas > 1:
            task = _on_one_device(task, setting.replicas)
        return task if task.loss_fn is None else dataclasses.replace(task, loss_fn=with_count_metric(task.loss_fn))

    def _num_train(self, setting: Setting) -> int:
        if setting.short or self.short:
            short = self.batch_size // 4 + 1
            num_rows = len(data.open_source(self._sources["train_data"], "train_data"))
            # A source of exactly one batch, as a stream returns, loses some rows: short-batch mutants need a short one.
            return max(1, num_rows - short) if num_rows == self.batch_size else self.batch_size + short
        return NUM_BATCHES * self.batch_size

    def _num_eval(self) -> int:
        """Returns the number of evaluation rows: a full and a short batch, or only full batches if the user's
        evaluation has no short batch."""
        if self._sources["eval_data"] is None:
            return 0
        num_rows = len(data.open_source(self._sources["eval_data"], "eval_data"))
        if num_rows % min(num_rows, self.config.eval.batch_size or self.config.largest_batch) == 0:
            return min(num_rows // self.batch_size, NUM_BATCHES) * self.batch_size or num_rows
        return self.batch_size + self.batch_size // 4 + 1

    def _rows(self, name: str, num: int) -> Any:
        user_data = self._sources[name]
        if user_data is None:
            return None
        if (name, num) not in self._cut:
            source = data.open_source(user_data, name)
            rows = source.gather(np.arange(min(num, len(source)), dtype=np.int64))
            if self.dtype == "float64":
                widened = {np.dtype(np.float32): np.float64, np.dtype(np.complex64): np.complex128}
                rows = jax.tree.map(lambda x: x.astype(widened.get(x.dtype, x.dtype)), rows)
            self._cut[name, num] = ArraySource(rows, name)
        return self._cut[name, num]

    # ---- running

    def run(
        self,
        program: Program | Unpadded,
        *,
        evaluate: bool = False,
        restore: bool = False,
        moved: Callable[[Any], Any] | None = None,
    ) -> Results:
        """Returns the program's results: single steps from the initial state, then `steps` consecutive steps.

        Args:
            restore: also save the last state and restore it on one device.
            moved: applied to the initial parameters and to the examples of every batch, on the host.
        """
        start = self._start(program)
        if moved is not None:
            start = start.replace(params=moved(start.params))

        def begin() -> TrainState:
            # Keys stay on the devices after device_get. Without a copy, the first step would donate them.
            copies = jax.tree.map(lambda x: jnp.copy(x) if is_key(x) else x, start)
            placed: TrainState = jax.device_put(copies, program.state_sharding)
            return placed

        batches = [batch for _, batch in program.batches(stop=max(self.steps, NUM_BATCHES))]
        if moved is not None:
            batches = [
                dataclasses.replace(
                    b, examples=jax.tree.map(lambda x: jax.device_put(moved(x), x.sharding), b.examples)
                )
                for b in batches
            ]
        single_steps = []
        for batch in batches[:NUM_BATCHES]:
            state, metrics = program.step(begin(), batch)
            model_state = _of_all_groups(state.model_state, program)
            single_steps.append(_step_result(state, jax.device_get(metrics), model_state, start.params))
        state, losses, last = begin(), list[float](), dict[str, Any]()
        for batch in batches[: self.steps]:
            state, last = program.step(state, batch)
            losses.append(float(last.get("loss", np.nan)))
        evaluation = None
        if evaluate and program.has_eval:
            evaluation = _numbers(program.eval(state))
        return Results(
            single_steps,
            losses,
            _numbers(jax.device_get(last)),
            flat(state.params),
            flat(_of_all_groups(state.model_state, program)),
            evaluation,
            self._through_checkpoint(state) if restore else None,
            _apart(state),
            program.form,
            frozenset(program._step_context.usage.functions),
        )

    def _start(self, program: Program | Unpadded) -> TrainState:
        """Returns the state before the first step, on the host. `init` returns constants, so it is compiled once for
        each form of the state."""
        structure = jax.tree.structure(program.abstract_state)
        form = tuple((path, x.shape, str(x.dtype)) for path, x in named_leaves(program.abstract_state))
        if form not in self._starts:
            self._starts[form] = jax.tree.leaves(jax.device_get(program.init()))
        state: TrainState = jax.tree.unflatten(structure, self._starts[form])
        return state

    def _through_checkpoint(self, state: TrainState) -> tuple[float, str]:
        """Returns (error, path) of the leaf that differs most after saving the state and restoring it on one device."""
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state)
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(Path(folder) / "checkpoints")
            checkpoints.save(1, state, {})
            checkpoints.wait()
            restored, _ = checkpoints.restore(1, abstract)
            checkpoints.close()
        before, after = flat(state), flat(restored)
        worst = (0.0, "")
        for path, x in before.items():
            difference = after[path] != x if x.dtype == bool else after[path] - x
            error = float(np.linalg.norm(difference) / max(float(np.linalg.norm(x)), 1e-30))
            worst = max(worst, (error, path)) if error > 0 or not worst[1] else worst
        return worst


def _without_streams(config: Config, task: Task, num: int) -> tuple[Config, Task]:
    """Returns the task with the first `num` rows of its streams as arrays, and a config without settings of streams."""
    task = with_streams(task, config)
    if isinstance(task.eval_data, data.EvaluationSets):  # all are evaluated by the same function
        task = dataclasses.replace(task, eval_data=next(iter(task.eval_data.values())))
    opened = task.named_data()
    rows: dict[str, Any] = {
        name: data.first_rows(x, num) for name, x in opened.items() if isinstance(x, data.CheckedStream)
    }
    if task.train_data is None:
        rows["train_data"] = np.arange(num, dtype=np.int32)
    elif "train_data" in rows:
        full = config.data.repeat  # otherwise the last batches of the stream have missing rows
        settings = {"data.repeat": True, "data.shards": None, "data.workers": 0, "data.drop_remainder": full}
        config = replace_keys(config, settings)
    return replace_keys(config, {"data.batched": False}) if rows else config, dataclasses.replace(task, **rows)


def _on_one_device(task: Task, replicas: int) -> Task:
    """Returns a task with the per-replica step of `replicas` as a global step: a `vmap`, as JAX defines `pmap`."""
    assert task.train_step is not None
    over_replicas = jax.vmap(task.train_step, (None, 0), None, axis_name=task.axis_name)

    def train_step(state: TrainState, batch: Any) -> Any:
        return over_replicas(
            state, jax.tree.map(lambda x: x.reshape(replicas, len(x) // replicas, *x.shape[1:]), batch)
        )

    return dataclasses.replace(task, train_step=train_step, view="global", axis_name=None)


NEED_AXIS = {
    "fsdp": ("layout.zero", "layout.fsdp", "layout.min_shard_bytes"),
    "context": ("attention.context", "attention.order"),
    "pipeline": ("pipeline.schedule", "pipeline.microbatches", "pipeline.chunks"),
}
"""Axis -> settings without effect on a mesh without this axis, where they are rejected."""


def _without_effect(config: Config, mesh: Mapping[str, int]) -> dict[str, Any]:
    changes = {}
    for path in (path for axis, paths in NEED_AXIS.items() if mesh.get(axis, 1) == 1 for path in paths):
        section, key = path.split(".")
        if hasattr(config, section):
            changes[path] = getattr(type(getattr(config, section))(), key)
    return changes


def _of_all_groups(model_state: Any, program: Program | Unpadded) -> Any:
    if program.config.model_state == "global":
        return model_state
    return agreement.merge_groups(program._step_context.options.state_reduction, model_state)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    arrays = {name: np.asarray(x) for name, x in metrics.items() if name != COUNT}
    return {
        f"{name}{list(place)}" if place else name: float(x)
        for name, array in arrays.items()
        for place, x in np.ndenumerate(array)
    }


def _step_result(state: TrainState, metrics: Mapping[str, Any], model_state: Any, before: Any) -> StepResult:
    opt_state = state.opt_state
    if not isinstance(opt_state, RecordingState):
        change = jax.tree.map(lambda x, y: x - y, jax.device_get(state.params), before)
        opt_state = RecordingState(change, opt_state, change)
    return StepResult(
        loss=float(metrics.get("loss", np.nan)),
        count=float(metrics[COUNT]) if COUNT in metrics else None,
        metrics=_numbers(metrics),
        gradient=flat(opt_state.gradient),
        update=flat(opt_state.update),
        optimizer=flat(opt_state.inner),
        state=flat(model_state),
    )


def _apart(state: TrainState) -> str | None:
    """Returns the path of the first leaf that differs bitwise between the devices that replicate it, or None."""
    for path, x in named_leaves(state):
        copies: dict[str, bytes] = {}
        data = jax.random.key_data(x) if is_key(x) else x
        for shard in data.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            if copies.setdefault(str(shard.index), bits) != bits:
                return path
    return None


def flat(tree: Any) -> Tree:
    """Returns path -> array of every leaf on the host, including integers and key data."""
    plain = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)
    return {path: np.asarray(x) for path, x in named_leaves(jax.device_get(plain))}
