"""The context of a traced function. `sk.mean`, `sk.shard`, `sk.value_and_grad` and others are pure functions of their
arguments and of two records, `Context` and `Examples`.

The program sets these while it traces the user's function, as `vmap` does with axis names. Outside of a program the
defaults apply: one device, no padding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdkit import compat
from spmdkit.communication.reducers.base import Reducer
from spmdkit.communication.reducers.sum import make as plain_sum
from spmdkit.compat.user_mesh import mesh_in_context, renamed_axes, resolve_annotations
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import shown
from spmdkit.foundation.trees import named_leaves
from spmdkit.mesh.annotations import Rules, rules_in_context, with_rules
from spmdkit.mesh.mesh import AXES, MODEL_AXES, REPLICA_AXES, describe_mesh, spec_axes
from spmdkit.step.reducer_io import ReducerSlots

_tokens = itertools.count()
# JAX caches the traces of functions (jit, checkpoint, custom_vjp). They are valid only for the record of their trace.
_traced_under = jax.make_user_context(None)

REDUCE, OPTIMIZER = "spmdkit/reduce", "spmdkit/optimizer"
RING, ALL_TO_ALL, MOE = "spmdkit/ring", "spmdkit/all_to_all", "spmdkit/moe"
PIPELINE, TENSOR, VOCAB = "spmdkit/pipeline", "spmdkit/tensor", "spmdkit/vocab"
SYNC, GUARD = "spmdkit/sync", "spmdkit/guard"
"""Scopes of operations (`jax.named_scope`) in profiles and for `plan`: the reduction over replicas, the optimizer's
update, each op, the synchronization of groups, and the guard."""

Form = Literal["plain", "mapped", "manual"]


@dataclass(frozen=True)
class Placements:
    """The shardings of gradients and parameters, as trees of `PartitionSpec` structured like the parameters.

    Attributes:
        compute: parameters while the loss is computed (ZeRO 1 and 2: replicated over fsdp).
        gradient: the reduced gradient (ZeRO 1: replicated; 2 and 3: sharded over fsdp).
        update: the optimizer's update (sharded over fsdp at every stage).
        shapes: path of each parameter -> its shape, in flattening order.
    """

    compute: Any
    gradient: Any
    update: Any
    shapes: Mapping[str, tuple[int, ...]]

    def of(self, part: Any) -> Placements:
        """Returns the placements of a subtree of the parameters, from leaves with the same shape and path suffix. A
        leaf with no match, or with matches that have different shardings, is replicated. `part` may also be the tree of
        the parameters with None for some leaves."""
        shapes = {path: jnp.shape(x) for path, x in named_leaves(part)}
        structure: Any = jax.tree.structure(part)
        if shapes == self.shapes and structure == jax.tree.structure(self.compute):
            return self
        placed = zip(*map(jax.tree.leaves, (self.compute, self.gradient, self.update)), strict=True)
        table = list(zip(self.shapes.items(), placed, strict=True))
        with_none: Any = jax.tree.structure(part, is_leaf=lambda x: x is None)
        is_whole = with_none == jax.tree.structure(self.compute)

        def matching_specs(path: str, shape: tuple[int, ...]) -> tuple[PartitionSpec, ...]:
            names = path.split("/")
            ends = (f"/{'/'.join(names[i:])}" for i in range(len(names)))
            if is_whole:
                return next(specs for (key, _), specs in table if key == path)
            hits = ({specs for (key, size), specs in table if f"/{key}".endswith(e) and size == shape} for e in ends)
            specs_of_match = next(filter(None, hits), set())
            return specs_of_match.pop() if len(specs_of_match) == 1 else (PartitionSpec(),) * 3

        specs = zip(*(matching_specs(path, shape) for path, shape in shapes.items()), strict=True)
        compute, gradient, update = (jax.tree.unflatten(structure, of_leaf) for of_leaf in specs)
        return Placements(compute, gradient, update, shapes)


@dataclass(frozen=True)
class PipelineSettings:
    """Settings of `sk.pipeline`: the config's `pipeline`. None is its default."""

    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    microbatches: int | None = None
    chunks: int = 1


@dataclass(frozen=True)
class AttentionSettings:
    """Settings of `sk.attention`. The fields are those of the config's `attention`."""

    context: Literal["ring", "all_to_all"] = "ring"
    implementation: str = "auto"
    order: Literal["zigzag", "contiguous"] = "zigzag"
    block_q: int | None = None
    block_kv: int | None = None
    block_kv_compute: int | None = None
    fused_backward: bool | None = None


@dataclass(frozen=True)
class GuardSettings:
    """The guard of a step: its checks and their effects, as bits of finite_check.py.

    Attributes:
        looks: bits that are checked.
        skips: bits for which a step leaves the state unchanged.
        joins: whether the codes of all devices are combined.
    """

    looks: int
    skips: int = 0
    joins: bool = False


Function = Literal[
    "value_and_grad",
    "count_first",
    "mean",
    "example_mask",
    "example_keys",
    "all_gather",
    "ema",
    "optimizer",
    "rounding",
    "remat",
    "attention",
    "context_order",
    "pipeline",
]
"""Recorded functions of spmdkit. `count_first`: the count of a loss is added before the backward pass. `mean` covers
every metric, `ema` a new average of the parameters, `optimizer` the optimizer's update."""


@dataclass
class UsageTracker:
    """The features that user code has used in a trace. Records are only added, so a function that is traced twice, or
    not again because JAX has cached its trace, has the same effect.

    Attributes:
        functions: spmdkit functions that were called.
        axes: mesh axes that were named for activations.
        marks: names of values inside recomputed functions (`checkpoint_name`).
        num_masked: number of metrics that excluded padding rows from values with the rows as first dim.
        gradients: the abstract gradient of each call of `sk.value_and_grad`.
        user_meshes: (mesh of sharding annotations in user code, its axes on the program's mesh, or an empty string if
            the annotations have no effect).
        shard_maps: lines that call a `jax.shard_map` of user code.
        flax_rules: flax's logical axis rules in context at the sharding annotations.
        dropped_jits: `jax.jit` functions of user code, and their arguments that have no effect.
        tiles: the tiles of splash attention, in words.
    """

    functions: set[Function] = field(default_factory=set)
    axes: set[str] = field(default_factory=set)
    marks: set[str] = field(default_factory=set)
    num_masked: int = 0
    gradients: list[Any] = field(default_factory=list)
    user_meshes: set[tuple[str, str]] = field(default_factory=set)
    shard_maps: set[str] = field(default_factory=set)
    flax_rules: set[Rules] = field(default_factory=set)
    dropped_jits: set[str] = field(default_factory=set)
    tiles: set[str] = field(default_factory=set)

    def record_call(self, function: Function) -> None:
        """Records a call."""
        self.functions.add(function)

    def has_called(self, *functions: Function) -> bool:
        """Returns whether any of the functions was called."""
        return not self.functions.isdisjoint(functions)

    def without(self, function: Function) -> UsageTracker:
        """Returns a copy without calls of `function`."""
        return UsageTracker(
            self.functions - {function},
            set(self.axes),
            set(self.marks),
            self.num_masked,
            list(self.gradients),
            set(self.user_meshes),
            set(self.shard_maps),
            set(self.flax_rules),
            set(self.dropped_jits),
            set(self.tiles),
        )

    def merge_from(self, other: UsageTracker) -> None:
        """Adds all records of a copy."""
        self.functions |= other.functions
        self.axes |= other.axes
        self.marks |= other.marks
        self.user_meshes |= other.user_meshes
        self.shard_maps |= other.shard_maps
        self.flax_rules |= other.flax_rules
        self.dropped_jits |= other.dropped_jits
        self.tiles |= other.tiles
        self.num_masked = max(self.num_masked, other.num_masked)
        self.gradients = max(self.gradients, other.gradients, key=len)


@dataclass(frozen=True)
class StepOptions:
    """The options of a step, from the config and the task.

    Attributes:
        compute_dtype: dtype of parameters and inputs while the loss is computed; None: unchanged.
        inputs: floating point arrays of a batch that are cast to `compute_dtype`: `compute` (all), `given` (none), or
            path patterns.
        gradient_dtype: dtype in which microbatches are added, and of the gradient that the optimizer receives; None:
            that of the parameters.
        reduction_dtype: dtype in which devices send and add gradients; None: that of the gradient.
        float8: products of weights with a history are computed in float8 (ops/float8.py).
        rounds_stochastically: an update of a bfloat16 parameter is rounded stochastically (rounding.py).
        reducer: reduction of gradients over replicas.
        remat: values that `sk.remat` saves (`ops.remat.Remat`); None: nothing is recomputed.
        remat_whole: `remat` applies to the complete loss, since the task does not call `sk.remat`.
        state_reduction: path of a model state leaf -> its declared reduction (step/model_state/agreement.py).
        roles: path of a parameter that the optimizer does not train -> `frozen` or `overwritten` (leaf_roles.py).
        unread: paths of parameters with a gradient that the optimizer does not read.
        logical_axes: name of a dim -> mesh axes that shard it.
        flax_rules: flax's logical axis rules while user code is traced; empty: those that the user set.
        attention: settings of `sk.attention`.
        pipeline: settings of `sk.pipeline`, if the mesh has a pipeline axis.
        guard: handling of non-finite values; None: they are not checked.
        deterministic: only operations with bitwise reproducible results are used.
    """

    compute_dtype: Any = None
    inputs: str | Sequence[str] = "compute"
    gradient_dtype: Any = None
    reduction_dtype: Any = None
    float8: bool = False
    rounds_stochastically: bool = False
    reducer: Reducer = field(default_factory=plain_sum)
    remat: Any = None
    remat_whole: bool = False
    state_reduction: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, Literal["frozen", "overwritten"]] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    logical_axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    flax_rules: Rules = ()
    attention: AttentionSettings = field(default_factory=AttentionSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    guard: GuardSettings | None = None
    deterministic: bool = False


@dataclass(frozen=True)
class ShardingSpec:
    """The sharding of a step on the mesh.

    Attributes:
        form: `plain` (no replica axis), `mapped` (vmap over the replicas, the partitioner shards the rest) or `manual`
            (`shard_map`, only replica axes).
        mesh: the mesh of all devices; None: one device, nothing is sharded.
        sizes: size of every mesh axis.
        roles: the user's name of a mesh axis -> the axis.
        data_axes: mesh axes that the name `data` covers (with ZeRO 1 and 2 also `fsdp`).
        inner_axes: mesh axes that shard the examples of one replica.
        microbatches: number of microbatches per replica.
        placements: shardings of gradients and parameters; None: not constrained.
        explicit: whether user code is traced in JAX's explicit sharding mode (explicit.py).
        state_groups: number of replica groups with separate model states, [groups, ...]; None: there is one state.
    """

    form: Form = "plain"
    mesh: Mesh | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    data_axes: tuple[str, ...] = ("data",)
    inner_axes: tuple[str, ...] = ()
    microbatches: int = 1
    placements: Placements | None = None
    explicit: bool = False
    state_groups: int | None = None

    def size(self, *axes: str) -> int:
        """Returns the number of positions along `axes`. Axes that are not in the mesh have size one."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def larger(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Returns the `axes` with more than one position."""
        return tuple(a for a in axes if self.size(a) > 1)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """`replica` and the axes that `data` covers."""
        return ("replica", *self.data_axes)

    @property
    def num_replicas(self) -> int:
        """Number of positions along the replica axes."""
        return self.size(*self.replica_axes)

    @property
    def num_shards(self) -> int:
        """Number of shards of one replica's examples."""
        return self.size(*self.inner_axes)


@dataclass(frozen=True)
class Context:
    """The context of a traced step: sharding, options, position in the trace, and usage of spmdkit's functions.

    Attributes:
        sharding: the sharding of the step on the mesh.
        options: options from the user's config and task.
        group: (index, number) of the separately training groups of replicas; their axes have size one here.
        mask: bool[global batch] or None; False marks padding rows.
        slots: the reducer's state during this trace.
        inside: True while a per-replica step is traced inside `shard_map`.
        in_manual: True inside `sk.manual`, where arrays are shards.
        mapped_axes: model axes that an enclosing `vmap` of an op maps (the stages of a pipeline).
        usage: spmdkit functions that user code has called in this trace.
        analyses: (number, code and shapes of a loss) -> how rows enter it (dataflow/analysis.py); shared by all traces.
        token: unique per context.
    """

    sharding: ShardingSpec = field(default_factory=ShardingSpec)
    options: StepOptions = field(default_factory=StepOptions)
    group: tuple[Any, int] = (0, 1)
    mask: jax.Array | None = None
    slots: ReducerSlots = field(default_factory=lambda: ReducerSlots(()))
    inside: bool = False
    in_manual: bool = False
    mapped_axes: tuple[str, ...] = ()
    usage: UsageTracker = field(default_factory=UsageTracker)
    analyses: dict[Any, Any] = field(default_factory=dict, compare=False)
    token: int = field(default_factory=lambda: next(_tokens), init=False, compare=False)

    def with_options(self, **changes: Any) -> Context:
        """Returns the context with changed options."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **changes))

    def with_sharding(self, **changes: Any) -> Context:
        """Returns the context with a changed sharding."""
        return dataclasses.replace(self, sharding=dataclasses.replace(self.sharding, **changes))

    def for_new_trace(self, **changes: Any) -> Context:
        """Returns the context for another trace, with an empty usage record and changed fields."""
        return dataclasses.replace(self, usage=UsageTracker(), **changes)

    @property
    def platform(self) -> str:
        """The platform of the mesh's devices, `cpu`, `tpu` or `gpu`; without a mesh that of JAX's default."""
        mesh = self.sharding.mesh
        return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform

    @property
    def num_losses(self) -> int:
        """Number of loss calls in a step: microbatches of all replicas."""
        return self.sharding.microbatches * self.sharding.num_replicas

    @property
    def reducer_returns_sums(self) -> bool:
        """Whether the reducer's result must still be divided by the count of the full batch."""
        return self.options.reducer.input_scale == "sum" or self.sharding.num_replicas == 1


@dataclass(frozen=True)
class Examples:
    """The rows of one call of the user's loss: one microbatch on one replica.

    Attributes:
        num: number of rows.
        mask: bool[num], or None if no row is padding.
        positions: int32[num], positions in the global batch.
        key: key of the step, the same on every replica.
        whole: the rows of all replicas, in a `train_step` on global arrays.
        of_step: the rows of a full `train_step`, not of a loss within it.
        layer: number of the layer of `sk.pipeline` that is being traced, or None.
    """

    num: int
    mask: jax.Array | None
    positions: jax.Array
    key: jax.Array | None
    whole: bool = False
    of_step: bool = False
    layer: jax.Array | None = None
    token: int = field(default_factory=lambda: next(_tokens), init=False, compare=False)


_context: ContextVar[Context | None] = ContextVar("spmdkit_step", default=None)
_examples: ContextVar[Examples | None] = ContextVar("spmdkit_examples", default=None)
_in_part: ContextVar[bool] = ContextVar("spmdkit_part", default=False)


def current() -> Context:
    """Returns the context of the step being traced, or the default for one device."""
    return _context.get() or Context()


def current_examples() -> Examples | None:
    """Returns the rows of the loss being traced, or None outside of a loss."""
    return _examples.get()


def differing_axes(context: Context, x: jax.typing.ArrayLike) -> tuple[str, ...]:
    """Returns the mesh axes larger than one over which `x` may vary inside `shard_map`."""
    return context.sharding.larger(sorted(compat.varying_axes(x)))


@contextlib.contextmanager
def _during(variable: ContextVar[Any], value: Any) -> Iterator[Any]:
    before = variable.set(value)
    try:
        with _traced_under(tuple(x and x.token for x in (_context.get(), _examples.get()))):
            yield value
    finally:
        variable.reset(before)


@contextlib.contextmanager
def tracing(context: Context) -> Iterator[Context]:
    """Sets `context`, its mesh as the mesh of bare `PartitionSpec`s, and flax's rules while the body is traced. Rules
    that user code set around an inner trace stay."""
    mesh, rules = context.sharding.mesh, context.options.flax_rules if _context.get() is None else ()
    in_mesh = contextlib.nullcontext() if mesh is None else mesh_in_context(mesh)
    with with_rules(rules), _during(_context, context), in_mesh:
        yield context


def user_mesh(context: Context) -> Mesh | None:
    """Returns the program's mesh with the user's names of the axes; None if they have no other names."""
    mesh = context.sharding.mesh
    if mesh is None or not context.sharding.roles:
        return None
    return compat.auto_mesh(mesh.devices, user_spec(context, PartitionSpec(mesh.axis_names))[0])


def user_spec(context: Context, spec: PartitionSpec) -> PartitionSpec:
    """Returns a spec of the program in the user's names of the axes."""
    names = dict(zip(AXES, AXES, strict=True)) | {axis: name for name, axis in context.sharding.roles.items()}
    return renamed_axes(spec, names)


def _resolved_spec(spec: PartitionSpec) -> PartitionSpec | None:
    """Returns a bare spec in the names of the mesh axes, or None for the logical names in the metadata of flax's
    models, which the layout applies."""
    context = current()
    context.usage.flax_rules.add(rules_in_context())
    in_context = jax.sharding.get_abstract_mesh().axis_names  # the user's names in a `shard_map` and in explicit mode
    roles = {name: axis for name, axis in context.sharding.roles.items() if name not in in_context}
    spec = renamed_axes(spec, {name: roles.get(name, name) for name in spec_axes(spec)}) if roles else spec
    names = set(spec_axes(spec)) - set(AXES) - {PartitionSpec.UNCONSTRAINED}
    return None if names and names <= context.options.logical_axes.keys() else spec


def _resolved_sharding(annotation: NamedSharding) -> NamedSharding | None:
    """Returns an annotation of user code as a sharding on the program's mesh, or None if its mesh has other devices or
    another shape. Axes of a mesh of the user stand for the axes larger than one of the program's mesh, in order."""
    context, mesh = current(), annotation.mesh
    context.usage.flax_rules.add(rules_in_context())
    program = context.sharding.mesh
    if program is None or mesh.axis_names == program.axis_names or not isinstance(mesh, Mesh):
        return annotation
    theirs, ours = ([a for a in m.axis_names if m.shape[a] > 1] for m in (mesh, program))
    same_shape = [mesh.shape[a] for a in theirs] == [program.shape[a] for a in ours]
    is_program = same_shape and list(mesh.devices.flat) == list(program.devices.flat)
    meaning = ", ".join(f"{a} = {shown(b)}" for a, b in zip(theirs, ours, strict=False)) if is_program else ""
    context.usage.user_meshes.add((describe_mesh(mesh.shape), meaning))
    if not is_program:
        return None
    if context.sharding.form == "manual" and jax.sharding.get_abstract_mesh().manual_axes:
        return None  # only replica axes, over which the rows are sharded already
    return NamedSharding(program, renamed_axes(annotation.spec, dict(zip(theirs, ours, strict=True))))


def _enter_shard_map(line: str, own: Mesh | None) -> Mesh | None:
    """Records a call of a `jax.shard_map` of user code. Returns the program's mesh in the user's names, or a mesh of
    the user on the program's devices, with automatic axes: arrays have no types of explicit axes there."""
    context = current()
    program = context.sharding.mesh
    if line:
        context.usage.shard_maps.add(line)
    if own is None or program is None:
        return user_mesh(context)
    if not line:
        return own
    if own.size != program.size:
        raise ConfigError(
            f"jax.shard_map ({line}) has a mesh {describe_mesh(own.shape)} of the user's file, and the program has "
            f"{program.size} devices: {describe_mesh(program.shape)}. They need the same number. "
            "Remove mesh= from jax.shard_map, which then uses the program's mesh."
        )
    return compat.auto_mesh(program.devices.reshape(own.devices.shape), own.axis_names)


def _drops_jit(source: str, arguments: list[str]) -> bool:
    """Returns whether the donation and the shardings of a `jax.jit` in user code have no effect, and records them: the
    program is compiled as a whole, and the layout places its arrays."""
    if (context := _context.get()) is None:
        return False
    if arguments != ["donate_argnums"] or "site-packages" not in source:  # equinox donates inside filter_jit
        context.usage.dropped_jits.add(f"{', '.join(arguments)} of jax.jit({source})")
    return True


# At import: a `jax.shard_map` that a module of the user defines is called later.
resolve_annotations(_resolved_spec, _resolved_sharding, _enter_shard_map, _drops_jit)


def bound_replicas(context: Context) -> contextlib.AbstractContextManager[None]:
    """Binds the names of the replica axes, with size one, in a `plain` step, which does not bind them otherwise."""
    return compat.bound_axes(dict.fromkeys(REPLICA_AXES, 1) if context.sharding.form == "plain" else {})


def with_examples(examples: Examples) -> contextlib.AbstractContextManager[None]:
    """Sets `examples` while a loss is traced."""
    return _during(_examples, examples)


def in_part() -> contextlib.AbstractContextManager[None]:
    """Marks the body as traced by `sk.manual`, on a mesh that shards none of it."""
    return _during(_in_part, True)


def is_in_part() -> bool:
    """Returns whether a function of `sk.manual` is being traced, on any mesh."""
    return current().in_manual or _in_part.get()


def shard(x: jax.Array, *dims: str | None) -> jax.Array:
    """Returns `x` with each dim sharded over the mesh axes of its logical name. `None` leaves a dim unsharded.

    An activation constraint: it changes the sharding and not the values. Without constraints the partitioner may
    replicate activations on every device. A dim with `None` is gathered: `sk.shard(w, None, None)` gathers a weight.
    No-op on a mesh that shards no array.

    Layout: `dims` are names of `layout.axes`, e.g. `sk.shard(x_BTD, "batch", None, None)`. `batch` means the axes that
    shard the examples of one replica. `rows` means all axes that shard a batch, for data generated in a global
    `train_step` (collocation points, rollouts), which are replicated otherwise. In a loss, `rows` means `batch`.

    Raises:
        ValueError: the number of names differs from the number of dims, or a name is unknown.
    """
    context, examples = current(), current_examples()
    of_step = examples is not None and examples.whole and not context.inside
    if (context.sharding.form == "manual" and not of_step) or context.sharding.mesh is None or context.in_manual:
        return x
    if len(dims) != x.ndim:
        raise ValueError(
            f"sk.shard: {len(dims)} names {dims} for an array of {x.ndim} dims. Pass one name or None for each."
        )
    spec: list[tuple[str, ...] | None] = []
    sharding, inner = context.sharding, context.sharding.inner_axes
    rows = (*sharding.replica_axes, *inner) if of_step else inner
    names = {**context.options.logical_axes, "rows": rows, "batch": inner}
    for dim, length in zip(dims, x.shape, strict=True):
        if dim is not None and dim not in names:
            raise ValueError(f"sk.shard: unknown name '{dim}'. Known: {', '.join(sorted(names))}.")
        if dim == "rows" and of_step:  # the longest prefix that divides the rows evenly
            axes = sharding.larger(rows)
            while length % sharding.size(*axes):
                axes = axes[:-1]
        else:
            axes = names[dim] if dim else ()
            context.usage.axes.update(axes)
            axes = sharding.larger(a for a in axes if a not in (*sharding.data_axes, *context.mapped_axes))
        spec.append(axes if axes and length % sharding.size(*axes) == 0 else None)
    has_model_axes = sharding.larger(a for a in MODEL_AXES if a not in sharding.data_axes)
    if not has_model_axes and not any(axes for dim, axes in zip(dims, spec, strict=True) if dim == "rows"):
        return x
    placed = NamedSharding(context.sharding.mesh, PartitionSpec(*spec))
    return jax.lax.with_sharding_constraint(x, placed)  # type: ignore[no-any-return]


def shard_like_params(context: Context, tree: Any, placement: Literal["compute", "update"]) -> Any:
    """Returns a tree like (a subtree of) the parameters, sharded as they are in the loss or the optimizer's update."""
    mesh, placements = context.sharding.mesh, context.sharding.placements
    if context.sharding.form == "manual" or mesh is None or placements is None:
        return tree
    if jax.sharding.get_abstract_mesh().are_all_axes_explicit:
        shard: Any = lambda x, spec: jax.reshard(x, user_spec(context, spec))
    else:
        shard = lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) if len(spec) else x
    return jax.tree.map(shard, tree, getattr(placements.of(tree), placement))


def sharded_arange(num: int) -> jax.Array:
    """Returns int32[num], 0 to num - 1, sharded like a batch, for data generated in a global `train_step`.

    `jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(state.key, i), (2,)))(sk.sharded_arange(4096))` are points
    that are sharded over the replicas. In a loss, all elements belong to one replica.
    """
    return shard(jnp.arange(num, dtype=jnp.int32), "rows")
