"""The layout: the sharding of every leaf of the train state, with a reason. A printable table.

The first match decides the placement of a leaf:
  1. a rule of the config, 2. a rule of the task, 3. metadata of linen or nnx on the leaf, 4. a sharding constraint in
  `init`, 5. `fsdp: auto`, the largest dim that the fsdp axis divides, above a minimum size; 6. replicated.

ZeRO stages (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section
5) define what the fsdp axis shards: 1 the optimizer state, 2 also the gradients, 3 also the parameters.

    stage 3: W[D_fsdp, F]  all_gather before use, forward and backward; reduce_scatter of the gradient
    stage 2: W[D, F]       reduce_scatter of the gradient, all_gather of the new parameters
    stage 1: W[D, F]       all_reduce of the gradient, all_gather of the new parameters
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdkit.errors import ConfigError
from spmdkit.foundation.constants import LOGICAL_AXES
from spmdkit.foundation.formatting import columns, format_bytes, nearest, shown, shown_axes
from spmdkit.foundation.trees import describe, leaf_bytes, named_leaves
from spmdkit.mesh.annotations import Annotations, Dim, Rules, model_annotations
from spmdkit.mesh.mesh import AXES, REPLICA_AXES, canonical, count, dim_axes, spec_axes

Rule = tuple[str, Sequence[Dim]]


@dataclass(frozen=True)
class LeafPlacement:
    """The placement of one leaf. `spec` is canonical; `reason` names its rule, metadata or heuristic."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    memory_kind: str
    reason: str

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """Returns the JAX sharding of this leaf on `mesh`."""
        return NamedSharding(mesh, self.spec, memory_kind=self.memory_kind)

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that shard the leaf."""
        return frozenset(spec_axes(self.spec))

    @property
    def num_bytes(self) -> int:
        """Global bytes of the leaf."""
        return leaf_bytes(self)


@dataclass(frozen=True)
class LayoutOptions:
    """The parts of the config that decide placements (`layout`, `offload`)."""

    config_rules: tuple[Rule, ...] = ()
    task_rules: tuple[Rule, ...] = ()
    annotations: Annotations = field(default_factory=Annotations)
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: logical_axes({}))
    fsdp: str = "auto"
    min_shard_bytes: int = 2**14
    replicate_above_bytes: int = 2**27


def logical_axes(*rows: Mapping[str, Dim] | Rules) -> dict[str, tuple[str, ...]]:
    """Returns name of a dim -> mesh axes: first the mesh axes under their names, then the defaults, then `rows` in
    order (the config's roles, flax's rules, `layout.axes`); later entries override."""
    table = {axis: (axis,) for axis in AXES} | dict(LOGICAL_AXES)
    for part in rows:
        table |= {n: dim_axes(v) for n, v in (part.items() if isinstance(part, Mapping) else reversed(part))}
    return table


def lay_out(params: Any, options: LayoutOptions, sizes: Mapping[str, int]) -> list[LeafPlacement]:
    """Returns the placement of every parameter under ZeRO 3, in flattening order.

    Args:
        params: abstract parameters (`jax.ShapeDtypeStruct` leaves), possibly boxed with linen or nnx metadata.
        sizes: size of every mesh axis.

    Raises:
        ConfigError: a rule that matches nothing, a leaf that two rules of one table match, an indivisible dim, an
            unknown name, a mesh axis used twice on a leaf, or a large leaf that would be replicated without a rule.
    """
    leaves = named_leaves(params)
    by_config = _match(options.config_rules, leaves, "layout.rules")
    by_task = _match(options.task_rules, leaves, "the task's rules")
    named = _constraints(options.annotations, leaves, sizes)
    named |= model_annotations(params, options.annotations.rules)
    named |= {path: (dims, f"task rule '{pattern}'") for path, (pattern, dims) in by_task.items()}
    named |= {path: (dims, f"rule '{pattern}'") for path, (pattern, dims) in by_config.items()}
    placements = []
    for path, leaf in leaves:
        if path in named:
            dims, reason = named[path]
            spec, replicas = _spec_of(path, leaf, dims, options.axes, sizes, reason)
        else:
            spec, reason = _automatic(leaf, options, sizes)
            replicas = _replica_axes(spec_axes(options.annotations.constraints.get(path, ())), sizes)
            if reason.startswith("replicated") and leaf_bytes(leaf) > options.replicate_above_bytes:
                raise ConfigError(
                    f"layout: parameter '{path}' ({format_bytes(leaf_bytes(leaf))}, shape {tuple(leaf.shape)}) would "
                    f"be replicated on all {sizes['fsdp']} fsdp devices ({reason}). A replicated parameter above "
                    f"layout.replicate_above_bytes ({format_bytes(options.replicate_above_bytes)}) needs a rule. Add "
                    f"the rule ['{path}', [{', '.join(['null'] * len(leaf.shape))}]], or one that shards it."
                )
        if replicas:
            reason += f"; not over {shown_axes(replicas)}: parameters are the same on all replicas"
        placements.append(LeafPlacement(path, tuple(leaf.shape), leaf.dtype, spec, "device", reason))
    return placements


def _replica_axes(axes: Iterable[str], sizes: Mapping[str, int]) -> list[str]:
    return [axis for axis in axes if axis in REPLICA_AXES and sizes[axis] > 1]


def _constraints(
    annotations: Annotations, leaves: Sequence[tuple[str, Any]], sizes: Mapping[str, int]
) -> dict[str, tuple[Sequence[Dim], str]]:
    """Returns path -> (dims, reason) of the constraints in `init` that shard a leaf evenly over model axes."""
    named: dict[str, tuple[Sequence[Dim], str]] = {}
    for path, leaf in leaves:
        constraint = annotations.constraints.get(path, ())
        spec = canonical([tuple(a for a in dim_axes(dim) if a not in REPLICA_AXES) for dim in constraint], sizes)
        parts = [count(sizes, dim_axes(dim)) for dim in spec]
        if parts and not any(length % num for length, num in zip(leaf.shape, parts, strict=False)):
            named[path] = (
                [*constraint, *[None] * (len(leaf.shape) - len(constraint))],
                "a sharding constraint in init",
            )
    return named


def _match(rules: Sequence[Rule], leaves: Sequence[tuple[str, Any]], where: str) -> dict[str, Rule]:
    claimed: dict[str, Rule] = {}
    for pattern, dims in rules:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{where}: pattern '{pattern}' is not a regular expression ({error}). Fix it.") from error
        paths = [path for path, _ in leaves if compiled.fullmatch(path)]
        if not paths:
            known = [path for path, _ in leaves]
            listed = f" The parameters are: {', '.join(known[:6])}{', ...' * (len(known) > 6)}."
            close = nearest(pattern, known) or listed
            raise ConfigError(
                f"{where}: pattern '{pattern}' matches none of the {len(known)} parameters. A pattern has to match a "
                f"whole path.{close}"
            )
        for path in paths:
            if path in claimed:
                raise ConfigError(
                    f"{where}: parameter '{path}' matches '{claimed[path][0]}' and '{pattern}'. A parameter has one "
                    "rule. Make one of the patterns narrower."
                )
            claimed[path] = (pattern, dims)
    return claimed


def _spec_of(
    path: str,
    leaf: Any,
    dims: Sequence[Dim],
    table: Mapping[str, tuple[str, ...]],
    sizes: Mapping[str, int],
    reason: str,
) -> tuple[PartitionSpec, list[str]]:
    """Returns the spec, and the axes of replicas that it would name."""
    stacks = bool(dims) and "pipeline" in {axis for name in dim_axes(dims[-1]) for axis in table.get(name, ())}
    if stacks:  # a rule of a stack of layers may name its leading dims alone
        dims = [*dims, *[None] * (len(leaf.shape) - len(dims))]
    if len(dims) != len(leaf.shape):
        raise ConfigError(
            f"layout: {reason} names {len(dims)} dims {list(dims)} for parameter '{path}' of shape "
            f"{tuple(leaf.shape)}. It needs one name (or null) for each of the {len(leaf.shape)} dims."
        )
    spec: list[tuple[str, ...]] = []
    replicas: list[str] = []
    owner: dict[str, int] = {}
    for i, (dim, length) in enumerate(zip(dims, leaf.shape, strict=True)):
        named: list[str] = []
        for name in dim_axes(dim):
            if name not in table:
                raise ConfigError(
                    f"layout: {reason} shards dim {i} of '{path}' by '{name}', which is neither a mesh axis nor a "
                    f"logical axis. Known: {', '.join(sorted(table))}.{nearest(name, table)} Add new names to "
                    "layout.axes."
                )
            named += table[name]
        replicas += _replica_axes(named, sizes)
        axes = [axis for axis in named if axis not in REPLICA_AXES and sizes[axis] > 1]
        for axis in axes:
            if axis in owner:
                raise ConfigError(
                    f"layout: {reason} uses mesh axis '{axis}' twice on '{path}' (dims {owner[axis]} and {i}). An "
                    "axis can shard one dim of a leaf. Set one of the two dims to null."
                )
            owner[axis] = i
        parts = count(sizes, axes)
        if length % parts:
            raise ConfigError(
                f"layout: {reason} shards dim {i} of '{path}' (length {length}) over {shown_axes(axes)} = {parts}: "
                f"{length} is not divisible by {parts}. Try length {(length // parts + 1) * parts}, or null for this "
                "dim."
            )
        spec.append(tuple(axes))
    return canonical(spec, sizes), replicas


def _automatic(leaf: Any, options: LayoutOptions, sizes: Mapping[str, int]) -> tuple[PartitionSpec, str]:
    size, num_bytes = sizes["fsdp"], leaf_bytes(leaf)
    if size == 1:
        return PartitionSpec(), "no fsdp axis"
    if options.fsdp != "auto":
        return PartitionSpec(), "replicated: layout.fsdp is off"
    if num_bytes < options.min_shard_bytes:
        return PartitionSpec(), f"small: {format_bytes(num_bytes)} is below layout.min_shard_bytes"
    divisible = [i for i, length in enumerate(leaf.shape) if length % size == 0 and length]
    if not divisible:
        return PartitionSpec(), f"replicated: no dim of {tuple(leaf.shape)} is divisible by fsdp({size})"
    best = max(divisible, key=lambda i: leaf.shape[i])
    spec = canonical([("fsdp",) if i == best else None for i in range(len(leaf.shape))], sizes)
    return spec, f"fsdp auto: dim {best} is the largest divisible"


def without_fsdp(spec: PartitionSpec, sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns `spec` without the fsdp axis: the leaf is replicated over fsdp."""
    return canonical([tuple(a for a in dim_axes(d) if a != "fsdp") for d in spec], sizes)


def follow(
    tree: Any, params: Sequence[LeafPlacement], options: LayoutOptions, sizes: Mapping[str, int], memory_kind: str
) -> list[LeafPlacement]:
    """Returns the placements of a tree with copies of the parameters (optimizer state, moving averages).

    A leaf with a parameter's shape, and with a path that ends with the parameter's path, has its placement under ZeRO
    3. Any other leaf (counters, factored moments) is placed by `fsdp: auto` from its shape.
    """
    by_path = {p.path: p for p in params}
    result = []
    for path, leaf in named_leaves(tree):
        parts = path.split("/")
        ends = (by_path.get("/".join(parts[start:])) for start in range(len(parts) + 1))
        param = next((p for p in ends if p is not None and p.shape == tuple(leaf.shape)), None)
        if param is not None:
            spec, reason = param.spec, f"as parameter '{param.path}'" if param.path else "as the parameter"
        else:
            spec, reason = _automatic(leaf, options, sizes)
        kind = memory_kind if len(leaf.shape) else "device"
        result.append(LeafPlacement(path, tuple(leaf.shape), leaf.dtype, spec, kind, reason))
    return result


def check_axes_used(placements: Sequence[LeafPlacement], sizes: Mapping[str, int]) -> None:
    """Rejects a mesh axis that shards no parameter: its devices would repeat each other's work.

    The `context` axis shards only activations; whether the model uses it is known once the model is traced.

    Raises:
        ConfigError: a model axis larger than one, other than those that also shard the batch, is in no placement.
    """
    used = {a for p in placements for a in p.axes}
    for axis in ("tensor", "pipeline"):
        if sizes[axis] > 1 and axis not in used:
            raise ConfigError(
                f"mesh.{axis} is {sizes[axis]}, but no parameter is sharded over {axis}: {sizes[axis]} devices would "
                f"repeat each other's work. Name it in layout.rules (e.g. a dim 'mlp' or '{axis}'), or use data: "
                f"{sizes[axis]}."
            )


def _shown_spec(spec: PartitionSpec) -> tuple[Any, ...]:
    return tuple(tuple(map(shown, dim)) if isinstance(dim, tuple) else dim and shown(dim) for dim in spec)


def table(placements: Sequence[LeafPlacement]) -> list[str]:
    """Returns the lines of a table: path, dtype and shape, global bytes, spec, memory, and the reason."""
    return columns(
        [
            (p.path, describe(p), format_bytes(p.num_bytes), f"P{_shown_spec(p.spec)}", p.memory_kind, p.reason)
            for p in placements
        ]
    )
