"""The sections of a config, as frozen pydantic models. The description of a field is its help, schema and docs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from spmdkit.config import fields
from spmdkit.config.fields import Section
from spmdkit.config.retention import Retention


class Mesh(Section):
    """Sizes of the mesh axes. An unnamed axis has size 1; an empty mesh is one device; one -1 takes the rest."""

    replica: fields.AxisSize | None = None
    """Replicas between hosts or slices, over the slowest links."""
    data: fields.AxisSize | None = None
    """Replicas: each computes the gradient of its examples."""
    fsdp: fields.AxisSize | None = None
    """Shards both the examples and the parameters, which are gathered when needed (see layout.zero)."""
    expert: fields.AxisSize | None = None
    """Shards the experts of a mixture of experts, and the examples."""
    context: fields.AxisSize | None = None
    """Shards the sequence dim."""
    tensor: fields.AxisSize | None = None
    """Shards matrices inside a layer, over the fastest links."""
    pipeline: fields.AxisSize | None = None
    """Splits the layers into stages."""

    def sizes(self) -> dict[str, int]:
        """Returns the sizes of the named axes; -1 is unchanged."""
        return {axis: size for axis in type(self).model_fields if (size := getattr(self, axis)) is not None}


class ClusterOptions(Section):
    """How processes discover each other."""

    environment: fields.Environment = "auto"
    """Which environment variables define the rank of this process: auto: all known environments, the most specific
    wins; a name: only that environment; none: one process, regardless of variables."""
    interface: fields.FileName = Field(default="auto", examples=["eth0"])
    """Address that CPU collectives (Gloo) advertise to other hosts: the name of a network interface. auto: the address
    of the host's name, or, if that is loopback, the address by which it reaches the coordinator."""


class Layout(Section):
    """The sharding of each parameter: rules, then metadata of the model, then the fsdp heuristic."""

    rules: list[fields.LayoutRule] = Field(default_factory=list)
    """Ordered [pattern, [axis of each dim]]: the pattern is a regular expression that matches the full path of a
    parameter (blocks/0/kernel), an axis is a logical axis, a mesh axis or null."""
    axes: dict[str, fields.MeshAxes] = Field(default_factory=dict)
    """Logical axis -> mesh axis, list of mesh axes or null; extends and overrides the defaults."""
    fsdp: Literal["auto", "off"] = "auto"
    """auto: leaves without a rule are sharded over the fsdp axis on their largest divisible dim."""
    zero: Literal[1, 2, 3] = 3
    """What the fsdp axis shards: 1 optimizer state, 2 also gradients, 3 also parameters. Needs mesh.fsdp."""
    min_shard_bytes: fields.NumBytes = 2**14
    """Size in bytes below which fsdp: auto replicates a leaf. Needs mesh.fsdp and fsdp: auto."""
    replicate_above_bytes: fields.NumBytes = 2**27
    """Size of a leaf in bytes above which replication over a model axis needs a rule."""


class Precision(Section):
    """Dtypes of a step. A plain `precision: bfloat16` means {compute: bfloat16}."""

    compute: fields.Dtype = "float32"
    """Dtype of the loss function's parameters and activations."""
    params: fields.Dtype = "float32"
    """Dtype in which the parameters are stored and updated."""
    reduction: fields.Dtype = Field(default_factory=fields.default_reduction)
    """Dtype in which devices send and add gradients, over replica axes and over fsdp; default: bfloat16 with compute:
    bfloat16, otherwise the wider of float32 and params. A reducer other than sum has its own format between replicas.
    Microbatches are added in the widest of float32, params and reduction."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How a bfloat16 parameter plus its update is rounded: nearest loses an update below 1/512 of the parameter;
    stochastic rounds up or down at random, so that updates are kept on average. Needs params: bfloat16."""
    matmul: Literal["compute", "float8"] = "compute"
    """Format of the products of weights: float8 multiplies e4m3 (gradients: e5m2) with delayed scaling, in tasks with
    `sk.float8_histories`, such as examples/gpt.py. Not with mesh.pipeline."""
    inputs: fields.Inputs | None = None
    """Floating-point arrays of a batch: compute casts all of them to the compute dtype, given casts none, a list casts
    those with a path that matches a pattern in it. null: as compute, and train lists the rounded arrays."""


class Pipeline(Section):
    """How `sk.pipeline` runs its stages. Needs mesh.pipeline."""

    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """gpipe: all forward passes, then all backward; 1f1b: alternating, memory bounded by the stages; interleaved: 1f1b
    with several chunks of layers per stage, a smaller bubble and more transfers."""
    microbatches: fields.Count | None = None
    """Number of parts into which the rows of one shard of a microbatch are split; null: the largest divisor of the rows
    that is at most 4 per stage."""
    chunks: fields.Count | None = None
    """Chunks of layers per stage, at least 2; null: 2. Needs schedule: interleaved."""


class Attention(Section):
    """How sk.attention runs."""

    context: Literal["ring", "all_to_all"] = "ring"
    """With mesh.context: ring passes keys and values around the ring; all_to_all shards the heads instead of the
    sequence, so the axis size must divide the number of heads."""
    implementation: Literal["auto", "xla", "cudnn", "splash"] = "auto"
    """auto: the best for the operands and the mesh's devices; xla: all devices; cudnn: NVIDIA GPUs; splash: TPUs."""
    order: Literal["zigzag", "contiguous"] = "zigzag"
    """Order of a sequence on the ring: zigzag gives each device an early and a late part, with equal work under a
    causal mask; contiguous gives it one part, and the last device has the most work."""
    block_q: fields.Count | None = None
    """Queries in a tile of splash attention, a multiple of 128 that divides the queries of a device; null: by chip and
    shape from published recipes (v6e, 7x), otherwise the largest of 512, 256 and 128. Larger tiles need more scoped
    VMEM (xla_tpu_scoped_vmem_limit_kib in compiler_options)."""
    block_kv: fields.Count | None = None
    """Keys in a tile of splash attention, as block_q."""
    block_kv_compute: fields.Count | None = None
    """Keys of a tile that are multiplied at a time, a multiple of 128 that divides block_kv; null: by recipe,
    otherwise block_kv."""
    fused_backward: fields.Flag | None = None
    """Backward pass of splash attention in one kernel with 5 products, instead of two with 7. It writes a part of the
    gradient of the queries for each tile of keys. null: by recipe, otherwise false."""


class RematNames(Section):
    """Rematerialization that saves only named values."""

    save: list[fields.Name] = Field(default_factory=list, min_length=1, examples=["[attention]"])
    """Names of jax.ad_checkpoint.checkpoint_name with values to save."""
    offload: list[fields.Name] = Field(default_factory=list, min_length=1, examples=["[block]"])
    """Names of values to offload to host memory until the backward pass. Excludes the same name in save."""


class StateGroup(Section):
    """Model state that is shared within groups of replicas."""

    group: fields.Count
    """Number of neighboring replicas that share one state; divides the number of replicas."""


class Data(Section):
    """How batches are formed."""

    shuffle: fields.Flag = True
    """Shuffle the training examples in each epoch, from the seed."""
    drop_remainder: fields.Flag = True
    """true: the last short batch of an epoch is dropped; false: it is padded to batch_size, and the padding rows are
    masked."""
    prefetch: fields.Few | None = None
    """Number of batches prefetched on the device, and in the reader. null: 2; on CPU devices none for arrays in memory
    with batches of at most 256 KiB, because there a thread takes more of the processors than the batch."""
    threads: fields.Few = 1
    """Reader threads of each process. With 1, one thread at a time reads the training and evaluation data."""
    check: Literal["sample", "full", "off"] = "sample"
    """Rows that are compared between processes and with those of the restored checkpoint. sample: some rows, at the
    start; full: also every row, in the background; off: only length and structure. The check for rows that differ when
    they are read again always runs."""
    retries: fields.Times = 0
    """Number of retries of a row when data[i] raises, with increasing pauses."""
    max_bad_examples: fields.Times = 0
    """Number of unreadable training examples that each process may skip. The next readable example replaces a skipped
    one unless the batch may contain padding."""
    skip_batches: list[fields.Batches] = Field(default_factory=list)
    """Batches to skip, by number or as [first, last]; numbered from 1 over all epochs, as if none were skipped."""
    bucket_boundaries: fields.Boundaries | None = None
    """Lengths to which the leaves of a batch are shortened: a batch has examples of one bucket, those up to a boundary.
    The last boundary is the length that examples are stored with. null: no buckets."""
    bucket_by: fields.Name | None = None
    """The leaf of train_data with the length of each example, for bucket_boundaries."""

    shards: fields.Count | None = None
    """Number of parts in which a stream is read; divides batch_size and is a multiple of the number of processes. null:
    the largest such number up to 16. A run keeps its number. An evaluation uses it if it divides its batches."""
    batched: fields.Flag = False
    """true: a stream yields chunks of rows, which are split and joined to batch_size; false: it yields examples."""
    repeat: fields.Flag = True
    """true: a stream that ends starts again; false: the run ends with the stream."""
    workers: fields.Times = 0
    """Number of processes that read the stream train_data on each process, at most one per shard. 0: a thread reads."""

    def skipped_ranges(self) -> list[tuple[int, int]]:
        """Returns `skip_batches` as (first, last)."""
        return [(x, x) if isinstance(x, int) else (x[0], x[1]) for x in self.skip_batches]


class Checkpoint(Retention):
    """When the state is saved. The last step and a stop are always saved."""

    every_steps: fields.Count | None = None
    """Steps between saves; null: no saves by step."""
    every_seconds: fields.Seconds | None = 600.0
    """Seconds between saves, on process 0's clock; null: no saves by time."""
    directory: fields.Bucket | None = None
    """Object store for the checkpoints, gs://bucket/folder or s3://bucket/folder (extra: storage), if hosts share no
    disk; null: checkpoints/ in run_dir."""
    max_failures: fields.Count = 3
    """Consecutive failed saves after which the run ends with 74. A failed save is retried at the next interval."""
    timeout_s: fields.Seconds = 600.0
    """Seconds after which an unfinished save is an error."""
    emergency_timeout_s: fields.Seconds | None = 60.0
    """Time limit in seconds for saving the last complete step when the data or a hook raises in a run of one process;
    null: no such save."""


class Eval(Section):
    """When and how the evaluation runs."""

    every_steps: fields.Count | None = None
    """Steps between evaluations; null: only at the end."""
    batch_size: fields.Count | None = None
    """Global examples per evaluation batch; null: batch_size."""
    batches: fields.Count | None = None
    """Maximum number of batches of an evaluation; null: all data."""
    params: Literal["params", "ema"] = "params"
    """The parameters to evaluate. ema needs the key ema."""


class InitFrom(Section):
    """The state before step 1, from weights of another program or run. Each device reads only its slice. A plain
    `init_from: runs/first@best` means {path: runs/first@best}."""

    file: fields.FileName | None = Field(default=None, examples=["model.safetensors"])
    """A safetensors file, or the model.safetensors.index.json of several. Excludes path."""
    path: fields.FileName | None = Field(default=None, examples=["runs/first@best"])
    """The directory or bucket of a run, with @best or @STEP (otherwise the newest step), or a folder that orbax or
    `save_pretrained` of transformers wrote."""
    names: fields.NameRules = Field(default_factory=list)
    """Pairs [regular expression that matches a whole name in the source, path of a parameter or null], or the map of a
    model of transformers (gpt2, llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text, bert, vit), or file.py:name
    of a function under @sk.weights, {file.py:name: {option: value}} with its keyword arguments. Names without a rule
    are paths, with / or dots."""
    what: list[Literal["params", "opt_state", "model_state", "ema"]] | None = Field(default=None, min_length=1)
    """Parts of the state to load; [ema] loads the average as the parameters. null: params, and model_state if a run
    has it. The rest starts new."""
    strict: fields.Flag = True
    """true: every leaf is loaded, and every array is used; false: init initializes the other leaves."""

    def located(self, folder: Path) -> str:
        """Returns the absolute path, or the URL. `folder`: the base of relative paths."""
        source = self.file or self.path or ""
        return source if "://" in source else str(folder / source)


class ParameterGroup(Section):
    """Settings of the optimizer for some parameters. A parameter may be in several groups that set different keys."""

    match: fields.Pattern = Field(examples=[".*bias"])
    """Regular expression that matches full paths of parameters."""
    weight_decay: Annotated[float, Field(ge=0, le=1e8)] | None = None
    """weight_decay of the optimizer, or add_decayed_weights of one without weight_decay; null: that of `optimizer`."""
    learning_rate_scale: fields.Positive | None = None
    """Factor of the learning rate; null: 1."""
    frozen: fields.Flag | None = None
    """true: not trained, as in Task(frozen=...); false: must be trained; null: as other settings decide."""

    @property
    def changes(self) -> dict[str, float]:
        """The settings of the optimizer."""
        return self.model_dump(include={"weight_decay", "learning_rate_scale"}, exclude_none=True)


class Log(Section):
    """What a run logs."""

    every_steps: fields.Count = 10
    """Steps between lines of metrics.jsonl and of the display."""
    progress: Literal["auto", "rich", "plain", "off"] = "auto"
    """The display on process 0; auto: rich on a terminal, plain lines elsewhere."""
    columns: Annotated[int, Field(ge=40, le=10_000)] | None = Field(default=None, examples=[160])
    """Width of the display's lines, which are wrapped; null: that of the terminal (the bar: at most 120), or 160."""
    trackers: list[fields.NamedChoice] = Field(default_factory=list)
    """Trackers in addition to metrics.jsonl: tensorboard, {wandb: {project: digits}}, {mlflow: {uri: sqlite:///m.db}},
    or a user-defined function under @sk.tracker, file.py:name; {name: {option: value}} with options."""
    max_mb: fields.Positive | None = 200.0
    """Maximum size of a file of process output under `launch`, in million bytes; the output then continues in the next
    file, stdout.1.txt, at the end of a line. null: no limit."""
    backups: fields.Count = 3
    """Number of newest files of process output that are retained, in addition to the first."""


class OnNonfinite(Section):
    """The action for non-finite values. A plain `on_nonfinite: skip` applies to loss, gradient and metrics."""

    loss: fields.Policy = "stop"
    """For the loss: stop: end with code 77; skip: the step changes only the step number; rollback: restore the newest
    checkpoint and continue without that batch; continue: report and continue."""
    gradient: fields.Policy = "stop"
    """The same for the gradient that the optimizer receives."""
    metrics: fields.Policy = "stop"
    """The same for every other metric of a step."""
    evaluation: Literal["stop", "continue"] = "stop"
    """For a metric of an evaluation, including the last evaluation and `spmdkit eval`."""
    max_consecutive: fields.Count = 10
    """Number of consecutive skipped steps, or of rollbacks in one process, after which the run ends with code 77."""
    save_batch: fields.Flag = False
    """Write the batch of a non-finite step to nonfinite/<step>.npz in the run's directory."""


class Watchdog(Section):
    """Timeouts for heartbeats and phases of a process. A timeout ends the job with 75, or with 76 and the stacks of all
    processes."""

    heartbeat_timeout_s: fields.Seconds = 30.0
    """Seconds without a heartbeat of a process, after which the other processes end with 75 and name it. Pauses of the
    entire job do not count."""
    step_timeout_s: fields.Seconds | None = None
    """Seconds for a step or for reading its batch; null: 40 times a usual step, at least 60; 300 for the first."""
    import_timeout_s: fields.Seconds = 1800.0
    """Seconds for importing the task and building its program."""
    compile_timeout_s: fields.Seconds = 3600.0
    """Seconds for compiling, and for the first step."""
    restore_timeout_s: fields.Seconds = 1800.0
    """Seconds for restoring a checkpoint."""
    save_timeout_s: fields.Seconds = 1800.0
    """Seconds that the run waits for a save; checkpoint.timeout_s usually expires first."""
    evaluation_timeout_s: fields.Seconds = 3600.0
    """Seconds for a batch of an evaluation, or for a hook."""
    hook_timeout_s: fields.Seconds = 60.0
    """Seconds for which a process may be in a hook after another process has left it. A hook that is slow on all
    processes is not affected."""
    interpreter_timeout_s: fields.Seconds | None = 600.0
    """Seconds for which C code may hold the interpreter lock; then launch ends the process with 76, and a process
    without launch exits with 1; null: no limit."""

    @property
    def longest_timeout_s(self) -> float:
        """The longest of these timeouts. Every background timeout must exceed it."""
        return float(max(value for value in self.model_dump().values() if value is not None))


class OnSpike(Section):
    """The action for a loss spike: a loss more than z_score robust deviations (1.48 times the median absolute
    deviation) above the median of previous losses."""

    action: fields.Policy = "skip"
    """stop, skip, rollback or continue, as in on_nonfinite; on_nonfinite.max_consecutive applies to spikes too."""
    z_score: fields.Positive = Field(default=6.0, examples=[6.0])
    """Number of robust deviations above the median beyond which a loss is a spike."""
    window: Annotated[int, Field(ge=8, le=4096)] = 128
    """Number of previous losses in the median; at least a quarter of them is required."""


class ReplicaCheck(Section):
    """Bitwise comparison of the copies of the train state on several devices."""

    every_steps: fields.Count = 1000
    """Steps between two checks. Each check reads the state once and waits for the result."""
    action: Literal["stop", "repair", "rollback", "continue"] = "stop"
    """If copies differ: stop: end with code 77; repair: the outlier of three or more copies receives the bytes of the
    majority, and of two copies the one that an audit identifies as faulty; rollback: restore a checkpoint at which all
    were equal; continue: report and continue."""


class CompileCache(Section):
    """Cache of compiled programs on the machine's disk, so that a restart does not compile again. null: no cache."""

    directory: fields.FileName | None = None
    """Folder that only its owner can access, since its contents are executed; null: SPMDKIT_COMPILE_CACHE, or
    ~/.cache/spmdkit/compile."""
    min_s: Annotated[float, Field(ge=0, le=1e8)] = 0.5
    """Compile time in seconds above which a program is cached."""
    max_bytes: fields.NumBytes = 4 * 2**30
    """Size in bytes above which the least recently used programs are removed."""
    saved: fields.FileName | None = None
    """Folder of `plan --save-compiled`: a run starts from its step if program, versions and devices are the same."""


class Profile(Section):
    """A profiler trace of some steps."""

    steps: fields.Range
    """First and last step of the trace; steps count from 1."""


class Budget(Section):
    """Maximum cost of a step. `plan` and `train` fail with code 78 above it; null: no limit."""

    collective_bytes: fields.NumBytes | None = None
    """Maximum bytes that one device sends in a step."""
    peak_memory: fields.NumBytes | None = None
    """Maximum memory of one device in a step, in bytes."""
    collectives_in_loop: Annotated[int, Field(ge=0, le=fields.INT32_MAX)] | None = None
    """Maximum number of collectives inside loops."""
    findings: Literal["none"] | None = None
    """none: a plan must have no findings."""


class ElasticOptions(Section):
    """How a job continues after a process dies, under launch --elastic MIN:MAX."""

    in_process: fields.Flag = False
    """The remaining processes continue with the state in their memory; false: all processes are restarted from the
    newest checkpoint. CPU devices only."""
    snapshot_every: fields.Count = 10
    """Steps between two snapshots of the state in the processes' memory, each shard on two processes. At most this many
    steps are repeated."""
    standby: fields.FewOrNone = 0
    """Number of standby processes on this machine, with all imports done, that replace processes that die. Each uses
    the memory of a process before its first step."""
    precompile: fields.Sizes = Field(default=[])
    """Numbers of processes for which the step is compiled ahead of time into the compile cache, by a job with as many
    processes at the lowest priority."""


RematPolicy = Literal[
    "none", "full", "dots", "dots_no_batch", "minimal", "minimal_flash", "save_dot_except_mlp", "save_qkv_proj",
    "offload_layer_inputs", "auto",
]  # fmt: skip
Remat = Annotated[RematPolicy | RematNames, fields.names_or(get_args(RematPolicy), RematNames)]
ModelState = Annotated[
    Literal["global", "replica"] | StateGroup,
    fields.names_or(("global", "replica"), StateGroup),
]
