"""Every setting of a run, and its sections (sections.py). The description of a field is its help, schema and docs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from spmdkit.config import fields, problems
from spmdkit.config.elastic import ElasticOptions
from spmdkit.config.fields import Section
from spmdkit.config.sections import (
    Attention,
    Budget,
    Checkpoint,
    ClusterOptions,
    CompileCache,
    Data,
    Eval,
    Layout,
    Log,
    Mesh,
    ModelState,
    OnNonfinite,
    OnSpike,
    Pipeline,
    Precision,
    Profile,
    Remat,
    ReplicaCheck,
    Watchdog,
)


class Settings(Section):
    """Every setting of a run, each right by itself; a `Config` (schema.py) is one whose settings go together."""

    task: fields.TaskName = Field(
        description="The user's Task: path/to/file.py:name (path from the config's folder) or package.module:name."
    )
    task_args: dict[str, Any] = Field(
        default_factory=dict,
        examples=["{width: 64}"],
        description="Keyword arguments, when the target is a function that returns a Task.",
    )
    run_dir: fields.FileName | None = Field(
        default=None, description="Directory of the run, from the config's folder; null: runs/<config name>."
    )
    seed: fields.Seed = Field(
        default=0, description="Seed of the initial parameters, of the order of examples and of all keys."
    )
    steps: fields.Count = Field(default=100, description="Steps to train; step 1 is the first.")
    batch_size: fields.Count = Field(
        default=32, description="Global examples of a step, over all replicas and microbatches."
    )
    microbatches: fields.CountOrAuto = Field(
        default=1,
        description="Parts into which a batch is cut, one after the other, with one update. Divides batch_size. auto: the "
        "fewest whose compiled step fits the device's memory.",
    )
    devices: fields.Devices = Field(
        default="auto",
        description="auto: all devices; cpu:N: N fake devices of this CPU, over all processes; or local indices.",
    )
    cluster: ClusterOptions = Field(default_factory=ClusterOptions, description="How processes find each other.")
    mesh: Mesh = Field(default_factory=Mesh, description="Axis sizes. One -1 fills; empty: one device.")
    layout: Layout = Field(default_factory=Layout, description="Where each parameter lives.")
    pipeline: Pipeline = Field(default_factory=Pipeline, description="How sk.pipeline runs its stages.")
    offload: list[Literal["params", "optimizer"]] = Field(
        default_factory=list,
        description="Parts of the train state that host memory holds between uses: params, optimizer; empty: all on the devices.",
    )
    reducer: fields.NamedChoice = Field(
        default="sum",
        description="How gradients are added over replicas: sum, ordered, {bfloat16: {...}}, or a user's own: file.py:name of a function under "
        "@sk.reducer, {file.py:name: {option: value}} with its keyword arguments. All but sum take warmup: N, the steps at the start in which "
        "sum adds instead.",
    )
    sync: fields.NamedChoice = Field(
        default="every_step",
        description="When replicas agree: every_step, {local_sgd: {every: N}}, {diloco: {every: N}}, {post_local: {start: S, every: N}}, {stale: K}, or a user's own: file.py:name of a function under "
        "@sk.sync, {file.py:name: {option: value}} with its keyword arguments; or without one step of all: {parameter_server: {servers: "
        "1, workers: 2}}.",
    )
    precision: Annotated[
        Precision,
        BeforeValidator(fields.dtype_to_mapping, json_schema_input_type=Literal["float32", "bfloat16"] | Precision),
    ] = Field(default_factory=Precision, description="Dtype of the computation, or dtypes of compute, params, reduce.")
    remat: Remat = Field(
        default="none",
        description="What sk.remat keeps for the backward pass: all, nothing, matrix products, or named values, on the device or the host. auto: the "
        "most that fits the device's memory.",
    )
    attention: Attention = Field(default_factory=Attention, description="How sk.attention runs.")
    compiler_options: fields.CompilerOptions = Field(
        default_factory=dict,
        description="Options of XLA and their values, beyond those that spmdkit gives it (spmdkit/program/compiler.py); null removes one of these.",
    )
    optimizer: fields.Optimizer | None = Field(
        default=None, description="name of an optax optimizer and its keyword arguments; null: the task's own."
    )
    learning_rate: fields.LearningRate | None = Field(
        default=None,
        description="A number, or name of an optax schedule and its keyword arguments; null: the optimizer's own.",
    )
    clip_norm: fields.Positive | None = Field(
        default=None, description="Largest global norm of the gradient; null: no clipping."
    )
    ema: fields.Fraction | None = Field(
        default=None, description="Decay of the average of parameters; null: no average."
    )
    model_state: ModelState = Field(
        default="global",
        description="How replicas agree on mutable model state: one, one for each, or one for each group.",
    )
    data: Data = Field(default_factory=Data, description="How batches are made.")
    budget: Budget | None = Field(default=None, description="What a step may cost; null: whatever it costs.")
    checkpoint: Checkpoint | None = Field(
        default_factory=Checkpoint, description="When the state is saved; null: never."
    )
    eval: Eval = Field(default_factory=Eval, description="When and on what the evaluation runs.")
    log: Log = Field(default_factory=Log, description="What is told while a run goes on.")
    hooks: list[fields.NamedChoice] = Field(
        default_factory=list,
        description="A user's own hooks beside Task(hooks=...): path/to/file.py:name or package.module:name of a sk.Hook, or of a function "
        "under @sk.hook; {name: {option: value}} with its keyword arguments.",
    )
    profile: Profile | None = Field(default=None, description="Steps of which a profiler trace is taken; null: none.")
    compile_cache: CompileCache | None = Field(
        default_factory=CompileCache,
        description="What XLA has compiled, kept for the next start; null: nothing is kept.",
    )
    watchdog: Watchdog | None = Field(
        default_factory=Watchdog, description="How long nothing may happen before the job ends; null: for ever."
    )
    elastic: ElasticOptions = Field(
        default_factory=ElasticOptions, description="How a job goes on without a process that dies."
    )
    preemption: list[fields.NamedChoice] = Field(
        default_factory=list,
        description="Who is asked whether this machine is about to be taken away, beside SIGTERM and SIGUSR1: gce, aws, {file: {path: /run/preempt}}. At a notice "
        "to any process all save at one step and leave with 42.",
    )
    health_check: fields.Flag = Field(
        default=False,
        description="Before each start all devices compute the same products for three seconds; where one gives other bits, nothing is trained.",
    )
    replica_check: ReplicaCheck | None = Field(
        default=None,
        description="How often the copies of the state on several devices are compared bit by bit, and what is done where they differ; null: never.",
    )
    deterministic: fields.Flag = Field(
        default=False,
        description="On GPUs: only operations that give the same bits each time, and no autotuning; what has no such form is refused. CPUs and TPUs "
        "do so anyway.",
    )
    on_spike: OnSpike | None = Field(
        default=None,
        description="What is done where the loss is finite and far above those before it; null: nothing. The limit is set at log steps.",
    )
    on_nonfinite: Annotated[
        OnNonfinite, BeforeValidator(fields.policy_to_mapping, json_schema_input_type=fields.Policy | OnNonfinite)
    ] = Field(
        default_factory=OnNonfinite,
        description="What is done where loss, gradient, metrics or an evaluation are not finite: one policy, or one for each.",
    )

    def policies(self) -> Mapping[str, str]:
        """Returns what is done about a step whose loss, gradient or metrics are not finite, or whose loss is a
        spike."""
        asked = self.on_nonfinite
        own: dict[str, str] = {"loss": asked.loss, "gradient": asked.gradient, "metrics": asked.metrics}
        return own | {"spike": "continue" if self.on_spike is None else self.on_spike.action}

    _origin: problems.Origin = PrivateAttr(default_factory=problems.Origin)
