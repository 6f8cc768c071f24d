"""The sections of a config, as frozen pydantic models: what stands behind one key. The description of a field is its
help, schema and docs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from spmdkit.config import fields
from spmdkit.config.fields import Section
from spmdkit.config.retention import Retention


class Mesh(Section):
    """Sizes of the mesh axes. An axis that is not named has size 1; an empty mesh is one device; one -1 fills."""

    replica: fields.AxisSize | None = Field(
        default=None, description="Replicas between hosts or slices, the slowest links."
    )
    data: fields.AxisSize | None = Field(
        default=None, description="Replicas: each computes the gradient of its own examples."
    )
    fsdp: fields.AxisSize | None = Field(
        default=None,
        description="Cuts both the examples and the parameters, which are gathered when needed (see layout.zero).",
    )
    expert: fields.AxisSize | None = Field(default=None, description="Cuts the experts of a mixture, and the examples.")
    context: fields.AxisSize | None = Field(default=None, description="Cuts the sequence dim.")
    tensor: fields.AxisSize | None = Field(default=None, description="Cuts matrices inside a layer; the fastest links.")
    pipeline: fields.AxisSize | None = Field(default=None, description="Cuts the layers into stages.")

    def sizes(self) -> dict[str, int]:
        """Returns the axes that are named, -1 as it stands."""
        return {axis: size for axis in type(self).model_fields if (size := getattr(self, axis)) is not None}


class ClusterOptions(Section):
    """How processes find each other."""

    environment: fields.Environment = Field(
        default="auto",
        description="Whose environment variables say which process this is: auto reads all that are known, the most specific wins; a name reads that "
        "one alone; none: one process, whatever is set.",
    )
    interface: fields.FileName = Field(
        default="auto",
        examples=["eth0"],
        description="Whose address CPU collectives (Gloo) give to other hosts: the name of a network interface. auto: what the "
        "host's own name resolves to, and where that is loopback the address by which it reaches the coordinator.",
    )


class Layout(Section):
    """Where each parameter lives: rules, then metadata of the model, then the fsdp tactic."""

    rules: list[fields.LayoutRule] = Field(
        default_factory=list,
        description="Ordered [pattern, [axis of each dim]]: the pattern is a regular expression that matches the whole "
        "path of a parameter (blocks/0/kernel), an axis is a logical axis, a mesh axis or null.",
    )
    axes: dict[str, fields.MeshAxes] = Field(
        default_factory=dict,
        description="Logical axis -> mesh axis, list of mesh axes or null; added to the defaults and wins over them.",
    )
    fsdp: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: leaves that no rule shards are cut on their largest divisible dim over the fsdp axis.",
    )
    zero: Literal[1, 2, 3] = Field(
        default=3,
        description="What the fsdp axis cuts: 1 optimizer state, 2 gradients too, 3 parameters too. Needs mesh.fsdp.",
    )
    min_shard_bytes: fields.NumBytes = Field(
        default=2**14, description="Bytes below which fsdp: auto leaves a leaf whole. Needs mesh.fsdp and fsdp: auto."
    )
    replicate_above_bytes: fields.NumBytes = Field(
        default=2**27,
        description="Bytes of a leaf above which replication over a model axis must be asked for by a rule.",
    )


class Precision(Section):
    """Dtypes of a step. A plain `precision: bfloat16` means {compute: bfloat16}."""

    compute: fields.Dtype = Field(
        default="float32", description="Dtype of the loss function's parameters and activations."
    )
    params: fields.Dtype = Field(default="float32", description="Dtype in which the parameters are stored and updated.")
    reduce: fields.Dtype = Field(
        default_factory=lambda given: fields.widest("float32", given.get("params", "float32")),
        description="Dtype of gradients while they are summed; default: the wider of float32 and params.",
    )
    inputs: fields.Inputs | None = Field(
        default=None,
        description="Floating point arrays of a batch: compute casts all of them to that dtype, given none, a list those whose whole "
        "path one of its patterns matches. null: compute, and train names those that it rounds.",
    )


class Pipeline(Section):
    """How `sk.pipeline` runs its stages. Needs mesh.pipeline."""

    schedule: Literal["gpipe", "1f1b", "interleaved"] = Field(
        default="1f1b",
        description="gpipe: all forward passes, then all backward; 1f1b: in turn, memory bounded by the stages; interleaved: "
        "1f1b with several chunks of layers per stage, a smaller bubble and more transfers.",
    )
    microbatches: fields.Count | None = Field(
        default=None,
        description="Parts into which the rows of one shard of a microbatch are cut; null: the largest divisor of their number "
        "that is at most 4 per stage.",
    )
    chunks: fields.Count | None = Field(
        default=None, description="Chunks of layers per stage, at least 2; null: 2. Needs schedule: interleaved."
    )


class Attention(Section):
    """How sk.attention runs."""

    context: Literal["ring", "all_to_all"] = Field(
        default="ring",
        description="With mesh.context: ring passes keys and values round; all_to_all trades the cut of the sequence for one "
        "of the heads, whose number it then has to divide.",
    )
    implementation: Literal["auto", "xla", "cudnn", "splash"] = Field(
        default="auto",
        description="auto: the best that takes the operands on the mesh's devices; xla: everywhere; cudnn: NVIDIA GPUs; "
        "splash: TPUs.",
    )
    order: Literal["zigzag", "contiguous"] = Field(
        default="zigzag",
        description="Order of a sequence on the ring: zigzag gives each device an early and a late part, the same work under a "
        "causal mask; contiguous: neighbours, the last device works longest.",
    )


class RematNames(Section):
    """Rematerialisation that keeps only what the model has named."""

    save: list[fields.Name] = Field(
        default_factory=list,
        min_length=1,
        examples=["[attention]"],
        description="Names given with jax.ad_checkpoint.checkpoint_name whose values are kept.",
    )
    offload: list[fields.Name] = Field(
        default_factory=list,
        min_length=1,
        examples=["[block]"],
        description="Names whose values are kept in host memory until the backward pass needs them. Excludes the same name in save.",
    )


class StateGroup(Section):
    """Model state that agrees within groups of replicas."""

    group: fields.Count = Field(description="Neighbouring replicas that share one state; divides their number.")


class Data(Section):
    """How batches are made."""

    shuffle: fields.Flag = Field(
        default=True, description="A new order of the training examples in each epoch, from the seed."
    )
    drop_remainder: fields.Flag = Field(
        default=True,
        description="true: the last short batch of an epoch is dropped; false: it is padded to batch_size, and the padding rows are masked.",
    )
    prefetch: fields.Few = Field(
        default=2, description="Batches that wait on the device, and in the reader, ahead of the step."
    )
    threads: fields.Few = Field(
        default=1,
        description="Reader threads of each process. With 1 the data of training and evaluation are read by one thread at a time.",
    )
    retries: fields.Times = Field(
        default=0, description="How often a row whose data[i] raised is read again, with a growing pause between."
    )
    max_bad_examples: fields.Times = Field(
        default=0,
        description="Training examples that each process may skip because they cannot be read. The next readable one replaces a skipped one, unless the batch can hold padding.",
    )
    skip_batches: list[fields.Batches] = Field(
        default_factory=list,
        description="Batches that are left out, by number or as [first, last]; counted from 1 as if none were left out, over all epochs.",
    )

    def left_out(self) -> list[tuple[int, int]]:
        """Returns `skip_batches` as (first, last)."""
        return [(x, x) if isinstance(x, int) else (x[0], x[1]) for x in self.skip_batches]


class Checkpoint(Retention):
    """When the state is saved. The last step and a stop are always saved."""

    every_steps: fields.Count | None = Field(default=None, description="Steps between saves; null: not by steps.")
    every_seconds: fields.Seconds | None = Field(
        default=600.0, description="Seconds between saves, on process 0's clock; null: not by time."
    )
    directory: fields.Bucket | None = Field(
        default=None,
        description="Folder of a bucket that takes the checkpoints, gs://bucket/folder or s3://bucket/folder (extra: storage), where hosts share no disk; "
        "null: checkpoints/ in run_dir.",
    )
    max_failures: fields.Count = Field(
        default=3,
        description="Saves that fail in a row before the run ends with 74; up to then one that failed is made up for at the next interval.",
    )
    timeout_s: fields.Seconds = Field(
        default=600.0, description="Seconds after which a save that does not end is an error."
    )
    emergency_timeout_s: fields.Seconds | None = Field(
        default=60.0,
        description="Limit of the save of the last complete step when the data or a hook raises in a run of one process; "
        "null: nothing is saved.",
    )


class Eval(Section):
    """When and on what the evaluation runs."""

    every_steps: fields.Count | None = Field(
        default=None, description="Steps between evaluations; null: only at the end."
    )
    batch_size: fields.Count | None = Field(
        default=None, description="Global examples of an evaluation batch; null: batch_size."
    )
    params: Literal["params", "ema"] = Field(
        default="params", description="The parameters evaluated. ema needs the key ema."
    )


class Log(Section):
    """What is told while a run goes on."""

    every_steps: fields.Count = Field(
        default=10, description="Steps between lines of metrics.jsonl and of the display."
    )
    progress: Literal["auto", "rich", "plain", "off"] = Field(
        default="auto", description="The display on process 0; auto: rich on a terminal, plain lines elsewhere."
    )
    trackers: list[fields.NamedChoice] = Field(
        default_factory=list,
        description="Where records go beside metrics.jsonl: tensorboard, or a user's own function under @sk.tracker, file.py:name; "
        "{name: {option: value}} with options.",
    )


class OnNonfinite(Section):
    """What is done where a number is not finite. A plain `on_nonfinite: skip` says so of loss, gradient and metrics."""

    loss: fields.Policy = Field(
        default="stop",
        description="Of the loss: stop: end with code 77; skip: the step leaves everything but its number as it was; rollback: back to the newest "
        "checkpoint, and on without that batch; continue: go on and say so.",
    )
    gradient: fields.Policy = Field(default="stop", description="The same of the gradient that the optimizer is given.")
    metrics: fields.Policy = Field(default="stop", description="The same of every other metric that a step gives.")
    evaluation: Literal["stop", "continue"] = Field(
        default="stop", description="Of a metric of an evaluation, also the last one and that of `spmdkit eval`."
    )
    max_consecutive: fields.Count = Field(
        default=10,
        description="Steps in a row that are skipped, and ways back in one process, after which the run ends with code 77.",
    )
    save_batch: fields.Flag = Field(
        default=False,
        description="The batch of a step that was not finite is written to nonfinite/<step>.npz in the run's directory.",
    )


class Watchdog(Section):
    """How long a process may be silent, and a phase of it take, before the job ends: 75, or 76 with the stacks of
    all."""

    heartbeat_timeout_s: fields.Seconds = Field(
        default=30.0,
        description="Seconds without a sign of life of a process, after which the others end with 75 and name it; pauses of all do not count.",
    )
    step_timeout_s: fields.Seconds | None = Field(
        default=None,
        description="Seconds that a step, or reading its data, may take; null: 40 times a usual step, at least 60; 300 for the first data.",
    )
    import_timeout_s: fields.Seconds = Field(
        default=1800.0, description="Seconds that importing the task and building its program may take."
    )
    compile_timeout_s: fields.Seconds = Field(
        default=3600.0, description="Seconds that compiling may take, and the first step."
    )
    restore_timeout_s: fields.Seconds = Field(
        default=1800.0, description="Seconds that restoring a checkpoint may take."
    )
    save_timeout_s: fields.Seconds = Field(
        default=1800.0, description="Seconds that the run may wait for a save; checkpoint.timeout_s ends most before."
    )
    evaluation_timeout_s: fields.Seconds = Field(
        default=3600.0, description="Seconds of a batch of an evaluation, or a hook."
    )
    interpreter_timeout_s: fields.Seconds | None = Field(
        default=600.0,
        description="Seconds without any Python in a process, for code in C that holds the interpreter: launch ends it with 76, a process alone "
        "ends with 1; null: never.",
    )

    @property
    def longest_timeout_s(self) -> float:
        """The longest of these: what every other limit in the background has to exceed."""
        return max(value for value in self.model_dump().values() if value is not None)


class OnSpike(Section):
    """What is done where a loss is far above those before it: more than z_score robust deviations (1.48 medians of the
    distance) above their median."""

    action: fields.Policy = Field(
        default="skip",
        description="stop, skip, rollback or continue, as in on_nonfinite; on_nonfinite.max_consecutive holds for spikes too.",
    )
    z_score: fields.Positive = Field(
        default=6.0, examples=[6.0], description="Robust deviations above the median that are a spike."
    )
    window: Annotated[int, Field(ge=8, le=4096)] = Field(
        default=128, description="Losses before it that count; a quarter of them have to be there first."
    )


class ReplicaCheck(Section):
    """Whether copies of the train state on several devices still have the same bits."""

    every_steps: fields.Count = Field(
        default=1000, description="Steps between two looks; each reads the state once and waits for it."
    )
    action: Literal["stop", "repair", "rollback", "continue"] = Field(
        default="stop",
        description="Where copies differ: stop: end with code 77; repair: the odd one of three or more gets the bits of the others, of two that which "
        "an audit finds at fault; rollback: back to a checkpoint from before, where all were the same; continue: go on and say so.",
    )


class CompileCache(Section):
    """Compiled programs that are kept on this machine's disk, so that a restart compiles nothing again. null: none are
    kept."""

    directory: fields.FileName | None = Field(
        default=None,
        description="Folder that its owner alone can enter; null: SPMDKIT_COMPILE_CACHE, or ~/.cache/spmdkit/compile. What is in it is run.",
    )
    min_s: Annotated[float, Field(ge=0, le=1e8)] = Field(
        default=0.5, description="Seconds of compiling from which a program is kept."
    )
    max_bytes: fields.NumBytes = Field(
        default=4 * 2**30, description="Bytes above which the programs that were used longest ago are removed."
    )


class Profile(Section):
    """Steps of which a profiler trace is taken."""

    start: fields.Count = Field(description="First step that is traced; steps count from 1.")
    steps: fields.Count = Field(default=3, description="Number of steps that are traced.")


class Budget(Section):
    """What a step may cost. `plan` and `train` fail with code 78 where it costs more; null: no limit."""

    collective_bytes: fields.NumBytes | None = Field(
        default=None, description="Bytes that one device may send over the links in a step."
    )
    peak_memory: fields.NumBytes | None = Field(default=None, description="Bytes of one device that a step may need.")
    collectives_in_loop: Annotated[int, Field(ge=0, le=fields.INT32_MAX)] | None = Field(
        default=None, description="Collective operations that may stand inside loops."
    )
    findings: Literal["none"] | None = Field(default=None, description="none: a plan may have no findings.")


Remat = Annotated[
    Literal["none", "full", "dots", "dots_no_batch", "auto"] | RematNames,
    fields.names_or(("none", "full", "dots", "dots_no_batch", "auto"), RematNames),
]
ModelState = Annotated[
    Literal["global", "replica"] | StateGroup,
    fields.names_or(("global", "replica"), StateGroup),
]
