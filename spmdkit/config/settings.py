"""Every setting of a run, and its sections (sections.py). The description of a field is its help, schema and docs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from spmdkit.config import fields, problems, sections
from spmdkit.config.fields import Section


class Settings(Section):
    """Every setting of a run, each validated separately; `Config` (schema.py) validates combinations."""

    task: fields.TaskName
    """The user's Task: path/to/file.py:name (path from the config's folder) or package.module:name."""
    task_args: dict[str, Any] = Field(default_factory=dict, examples=["{width: 64}"])
    """Keyword arguments, if the target is a function that returns a Task."""
    run_dir: fields.FileName | None = None
    """Directory of the run, relative to the config's folder; null: runs/<config name>."""
    init_from: (
        Annotated[
            sections.InitFrom,
            BeforeValidator(fields.source_to_mapping, json_schema_input_type=str | sections.InitFrom),
        ]
        | None
    ) = None
    """Weights that replace those of the task's init: a safetensors file, a run (runs/first@best), a bucket, or a folder
    of orbax. A checkpoint of this run takes precedence; null: init."""
    seed: fields.Seed = 0
    """Seed of the initial parameters, the order of examples and all random keys."""
    steps: fields.Count | None = 100
    """Steps to train; step 1 is the first. null: those of epochs."""
    epochs: fields.Count | None = None
    """Passes over train_data to train, instead of steps; needs data with a length. null: steps."""
    batch_size: fields.BatchSize = 32
    """Global examples per step, over all replicas and microbatches; or a schedule {0: 256, 2000: 1024}: 1024 after 2000
    steps."""
    microbatches: fields.CountOrAuto = 1
    """Number of sequential parts of a batch, with one update. Divides batch_size. auto: the smallest number that fits
    the device's memory."""
    devices: fields.Devices = "auto"
    """auto: all devices; cpu:N: N fake devices of this CPU, over all processes; or local indices."""
    cluster: sections.ClusterOptions = sections.ClusterOptions()
    """How processes discover each other."""
    mesh: sections.Mesh = sections.Mesh()
    """Axis sizes. One -1 takes the rest of the devices; empty: one device."""
    roles: dict[fields.AxisName, fields.Axis] = Field(default_factory=dict, examples=["{dp: data, model: tensor}"])
    """Your name of a mesh axis -> its role, a mesh axis of spmdkit. `mesh`, `layout` and the functions of the task use
    your names, and so does the output."""
    layout: sections.Layout = sections.Layout()
    """Sharding of each parameter."""
    pipeline: sections.Pipeline = sections.Pipeline()
    """How sk.pipeline runs its stages."""
    offload: list[Literal["params", "optimizer"]] = Field(default_factory=list)
    """Parts of the train state in host memory between steps: params, optimizer; empty: all on the devices."""
    reducer: fields.NamedChoice = "sum"
    """How gradients are reduced over replicas: sum, ordered, {bfloat16: {...}}, or user-defined: file.py:name of a
    function under @sk.reducer, {file.py:name: {option: value}} with its keyword arguments. All except sum accept
    warmup: N, the number of initial steps with sum."""
    sync: fields.NamedChoice = "every_step"
    """When replicas synchronize: every_step, {local_sgd: {every: N}}, {diloco: {every: N}}, {post_local: {start: S,
    every: N}}, {stale: K}, or user-defined: file.py:name of a function under @sk.sync, {file.py:name: {option: value}}
    with its keyword arguments; or asynchronous: {parameter_server: {servers: 1, workers: 2}}."""
    precision: Annotated[
        sections.Precision,
        BeforeValidator(
            fields.dtype_to_mapping, json_schema_input_type=Literal["float32", "bfloat16"] | sections.Precision
        ),
    ] = sections.Precision()
    """Dtype of the computation, or dtypes of compute, params, reduce."""
    remat: sections.Remat = "none"
    """What sk.remat saves for the backward pass: everything, nothing, matrix products, the values of a policy of
    MaxText, or named values, on the device or the host. auto: the most that fits the device's memory."""
    attention: sections.Attention = sections.Attention()
    """How sk.attention runs."""
    compiler_options: fields.CompilerOptions = Field(default_factory=dict)
    """XLA options and their values, in addition to those of spmdkit (spmdkit/program/compiler.py); null removes one of
    those."""
    optimizer: fields.Optimizer | None = None
    """Name of an optax optimizer and its keyword arguments; add_decayed_weights: factor of an L2 penalty that is added
    to the gradient; null: the task's optimizer."""
    learning_rate: fields.LearningRate | None = None
    """A number, or the name of an optax schedule and its keyword arguments (join_schedules: {schedules, boundaries};
    also log_warmup_schedule and power_schedule; offset: its first step); null: that of the optimizer."""
    groups: list[sections.ParameterGroup] = Field(default_factory=list)
    """Settings of the optimizer for parameters that match a pattern."""
    train_only: Annotated[list[fields.Pattern], Field(min_length=1)] | None = None
    """Patterns of full paths of the parameters that are trained. All others are frozen: no gradient, no reduction, no
    optimizer state; null: all are trained."""
    clip_norm: fields.Positive | None = None
    """Maximum global norm of the gradient; null: no clipping."""
    ema: fields.Fraction | None = None
    """Decay of the exponential moving average of parameters; null: no average."""
    model_state: sections.ModelState = "global"
    """How replicas share mutable model state: one for all replicas, one per replica, or one per group."""
    data: sections.Data = sections.Data()
    """How batches are formed."""
    budget: sections.Budget | None = None
    """Maximum cost of a step; null: no limit."""
    checkpoint: sections.Checkpoint | None = sections.Checkpoint()
    """When the state is saved; null: never."""
    eval: sections.Eval = sections.Eval()
    """When and how the evaluation runs."""
    log: sections.Log = sections.Log()
    """What a run logs."""
    hooks: list[fields.NamedChoice] = Field(default_factory=list)
    """Hooks in addition to Task(hooks=...): early_stopping, reduce_on_plateau, {samples: {fn: file.py:name, every: N}},
    {stop_after: {seconds: S}}, or user-defined: path/to/file.py:name or package.module:name of an sk.Hook, or of a
    function under @sk.hook; {name: {option: value}} with its keyword arguments."""
    profile: sections.Profile | None = None
    """A profiler trace of some steps; null: none."""
    compile_cache: sections.CompileCache | None = sections.CompileCache()
    """Cache of compiled programs for the next start; null: no cache."""
    watchdog: sections.Watchdog | None = sections.Watchdog()
    """Timeouts before a stalled job is terminated; null disables a timeout."""
    elastic: sections.ElasticOptions = sections.ElasticOptions()
    """How a job continues after a process dies."""
    preemption: list[fields.NamedChoice] = Field(default_factory=list)
    """Preemption sources in addition to SIGTERM and SIGUSR1: gce, aws, {file: {path: /run/preempt}}. On a notice to any
    process all processes save at the same step and exit with 42."""
    health_check: fields.Flag = False
    """Before each start, all devices compute the same products for three seconds. If the results differ, the run
    ends."""
    replica_check: sections.ReplicaCheck | None = None
    """How often the copies of the state on several devices are compared bitwise, and the action if they differ; null:
    never."""
    deterministic: fields.Flag = False
    """On GPUs: only deterministic operations, and no autotuning; operations without a deterministic form are rejected.
    CPUs and TPUs are always deterministic."""
    on_spike: sections.OnSpike | None = None
    """The action for a finite loss far above the previous losses; null: none. The limit is updated at log steps."""
    row_mixing: Annotated[
        Literal["warn", "error"],
        Field(
            description="A loss that mixes the rows of a replica, so that its value depends on the mesh and on the "
            "number of microbatches: warn reports the line at the start, error refuses it."
        ),
    ] = "warn"
    on_nonfinite: Annotated[
        sections.OnNonfinite,
        BeforeValidator(fields.policy_to_mapping, json_schema_input_type=fields.Policy | sections.OnNonfinite),
    ] = sections.OnNonfinite()
    """The action if loss, gradient, metrics or an evaluation are not finite: one policy, or one policy for each."""

    @property
    def batch_sizes(self) -> tuple[tuple[int, int], ...]:
        """The schedule of the batch size: (completed steps, size), ascending from 0."""
        return ((0, self.batch_size),) if isinstance(self.batch_size, int) else tuple(self.batch_size.items())

    @property
    def largest_batch(self) -> int:
        """The largest batch size."""
        return max(size for _, size in self.batch_sizes)

    def policies(self) -> Mapping[str, str]:
        """Returns the action for a step with a non-finite loss, gradient or metric, or with a loss spike."""
        requested = self.on_nonfinite
        actions: dict[str, str] = {"loss": requested.loss, "gradient": requested.gradient, "metrics": requested.metrics}
        return actions | {"spike": "continue" if self.on_spike is None else self.on_spike.action}

    _origin: problems.Origin = PrivateAttr(default_factory=problems.Origin)
