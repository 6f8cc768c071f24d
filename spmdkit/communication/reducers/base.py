"""What a reducer is: how the gradients of the replicas become one. A file each in this folder, `make(**options) ->
Reducer`, found by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit import compat
from spmdkit.foundation.trees import common_dtype

Leaves = list[jax.Array]
LeafState = Mapping[str, jax.Array]
ReducerMetrics = Mapping[str, jax.Array]
"""name -> float32[], the same on every device of the mesh: what a reducer tells of one step."""
LeafShapes = Mapping[str, jax.ShapeDtypeStruct]

METRIC_PREFIX = "reducer/"
"""Begins the names of metrics that are what a reducer tells."""

PAD = 1024
"""A buffer has a multiple of this many values for each replica: the TPU compiler turns shorter gathers into all-reduces
(libtpu 0.0.42)."""


@dataclass(frozen=True)
class ReduceGroup:
    """Where one call of `apply` runs: inside a `shard_map` that is manual over all mesh axes.

    Attributes:
        axes: mesh axes to reduce over. Hand them whole to every collective, size-one axes too: what comes out must be
            typed as the same along all of them.
        num: the product of their sizes, at least 2.
        key: makes the key of this step, the same on every replica; fold in `lax.axis_index(axes)` for a replica's own.
        paths: of the leaves, in their order; empty where they have none.
    """

    axes: tuple[str, ...]
    num: int
    key: Callable[[], jax.Array]
    paths: tuple[str, ...] = ()


class ReducedLeaf(NamedTuple):
    """A leaf of the gradient as it is added, known before the first step.

    Attributes:
        path: of the parameter.
        shape: of one device's part of it.
        axes: replica axis -> size, of those larger than one over which it is added.
        cut: mesh axes that cut it: leaves of the same share a buffer.
        before: replica axes over which ZeRO 2 has added it, before the reducer.
        value_bytes: of a value that crosses as it is: 4, with `precision.reduce: float64` 8.
    """

    path: str
    shape: tuple[int, ...]
    axes: Mapping[str, int]
    cut: tuple[str, ...]
    before: tuple[str, ...] = ()
    value_bytes: int = 4

    @property
    def num(self) -> int:
        """The replicas over which it is added."""
        return math.prod(self.axes.values())

    @property
    def size(self) -> int:
        """Values on one device."""
        return math.prod(self.shape)

    @property
    def allreduce_bytes(self) -> float:
        """Bytes that one device sends for it by a ring all-reduce, or a reduce_scatter and an all_gather."""
        return 2 * (self.num - 1) / self.num * self.value_bytes * self.size


def group_by_axes(leaves: Sequence[ReducedLeaf]) -> list[list[ReducedLeaf]]:
    """Returns the leaves that are added over the same axes, together."""
    groups: dict[Any, list[ReducedLeaf]] = {}
    for leaf in leaves:
        groups.setdefault(tuple(leaf.axes), []).append(leaf)
    return list(groups.values())


def accept_all(leaves: Sequence[ReducedLeaf]) -> None:
    """Refuses nothing."""


def stateless(leaf: jax.ShapeDtypeStruct) -> LeafShapes:
    """Returns no state."""
    return {}


def split_evenly(state: LeafState, num: int) -> dict[str, jax.Array]:
    """Returns [num, ...] from [old, ...] with the same sum: what is owed stays owed."""
    return {name: jnp.broadcast_to(x.sum(0) / num, (num, *x.shape[1:])).astype(x.dtype) for name, x in state.items()}


@dataclass(frozen=True)
class Reducer:
    """How gradients are added over replicas.

    Attributes:
        exact: the result is the sum up to rounding in the leaves' own dtype. `verify` compares exact ones bit for bit
            over replicas and with one device; of the others it proves everything but the reducer itself, whose contract
            test bounds it.
        apply: `(leaves, states, over) -> (leaves, states)`.
            leaves: this device's shard of each leaf of one replica's gradient, dtype `precision.reduce`, [*shard of the
                leaf]; some of the tree's leaves, in flattening order: a step may call `apply` several times, over other
                axes (ZeRO 2). The same shapes and dtypes come back, summed over `over.axes`, bitwise the same on every
                replica and typed so: end with `psum` or `gather_parts`.
            states: one mapping for each leaf, as `init` gave it, [*shard of the leaf], typed varying along `over.axes`.
                Float32 whatever the leaves are.
            What leaves a replica may depend on a leaf's own buffer alone: never mix leaves that differ over other mesh
            axes (`buffer_groups`).
            Called once for each leaf and step, after the last microbatch, never in a loop.
        wire: bytes that one device sends for leaves of so many values over so many replicas: `(values, replicas)`, the
            formula of its documentation, and what the compiled program is held to.
        wire_of: `(leaves)`, where it depends on their shapes or on which axes they are added over; `wire` is then what
            it sends at most.
        init: shapes of one replica's state of one leaf, all zeros at the start. Every array has the leaf's shape: it
            lives in the train state as [replicas of the leaf, *leaf], cut as the gradient of the leaf is, so that it
            can be restored on any mesh.
        reshard_state: the state of one leaf on another number of replicas, [old, *leaf] -> [num, *leaf]. Runs in a
            compiled program, leaf by leaf.
        input_scale: what the leaves are. "sum": sums; the step divides once, afterwards, by the count of the whole
            batch (`sum`, `ordered`).
            "weighted": this replica's part of the mean (divided by the count of the whole batch before): for all that
            is not linear, and all that keeps something for the next batch, whose count may be another. "mean": this
            replica's own mean; what comes back is final (Adasum).
        per_shard_state: what a leaf's state belongs to is a shard of it, one for each position along the replica axes
            other than `replica`: the state is cut over these along `shard_dim` of the leaf, and a leaf without such a
            dim has none.
        add: `(tree, axes) -> tree`, the exact sum of what is no gradient: loss, counts, metrics and model state.
        warmup: steps at the start in which `sum` is used instead, while the state stays as it is: another program,
            chosen on the host. In a config it is an option of every reducer: `{bfloat16: {warmup: 100}}`.
        check: `(leaves)`: raises a `ConfigError` where these leaves cannot be added so, or not with less than `sum`
            sends: what asks for it, what is found, and the smallest change that works.
        exact_options: options at which the result equals `sum` (rank full, fraction 1), or None.
        apply_with_metrics: `apply` with a third result, `ReducerMetrics`: metrics of the step, `reducer/NAME`. Where it
            is given it is what is called in a step.
            None: there is nothing to tell. A reducer that tells is not taken where nobody would hear it: between groups
                that agree, as `outer`
            of `hierarchical`.
        validate_first_step: `(leaves, name -> number)`: raises a `ConfigError` where what it tells of the first step in
            which it adds shows a mistake.
    """

    exact: bool
    apply: Callable[[Leaves, list[LeafState], ReduceGroup], tuple[Leaves, list[LeafState]]]
    wire: Callable[[int, int], float]
    wire_of: Callable[[Sequence[ReducedLeaf]], float] | None = None
    init: Callable[[jax.ShapeDtypeStruct], LeafShapes] = stateless
    reshard_state: Callable[[LeafState, int], LeafState] = split_evenly
    input_scale: Literal["sum", "weighted", "mean"] = "sum"
    per_shard_state: bool = False
    add: Callable[[Any, tuple[str, ...]], Any] = lax.psum
    warmup: int = 0
    check: Callable[[Sequence[ReducedLeaf]], None] = accept_all
    exact_options: Mapping[str, Any] | None = None
    apply_with_metrics: (
        Callable[[Leaves, list[LeafState], ReduceGroup], tuple[Leaves, list[LeafState], ReducerMetrics]] | None
    ) = None
    validate_first_step: Callable[[Sequence[ReducedLeaf], Mapping[str, float]], None] | None = None

    def __post_init__(self) -> None:
        if self.init is not stateless and self.input_scale == "sum":
            raise ValueError(
                "a reducer with a state takes shares: a batch of another count would pay back in another unit"
            )

    def bytes_sent(self, leaves: Sequence[ReducedLeaf]) -> float:
        """Returns the bytes that one device sends for these leaves."""
        if self.wire_of is not None:
            return self.wire_of(leaves)
        return sum(self.wire(sum(leaf.size for leaf in group), group[0].num) for group in group_by_axes(leaves))

    @property
    def is_sum(self) -> bool:
        """Whether gradients are added as everything else is: a step without a call of `sk.value_and_grad` loses nothing
        by it."""
        return self.exact and self.input_scale == "sum" and self.add is lax.psum and self.apply_with_metrics is None


def inner_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the replica axes inside of a position along `replica`."""
    return tuple(a for a in axes if a != "replica")


def shard_dim(shape: Sequence[int], num: int) -> int | None:
    """Returns the first dim of (a device's part of) a leaf that `num` divides, None where none is."""
    return next((dim for dim, size in enumerate(shape) if size and size % num == 0), None)


def value_bytes(dtype: Any) -> int:
    """Returns the bytes in which a value of the gradient crosses as it is: float32 at least."""
    return max(4, jnp.dtype(dtype).itemsize)


def buffer_groups(leaves: Sequence[jax.Array]) -> list[list[int]]:
    """Returns the indices of the leaves that may share a buffer: those that differ over the same mesh axes, and have
    the same dtype."""
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault((compat.varying_axes(leaf), leaf.dtype), []).append(i)
    return list(groups.values())


def flatten(leaves: Sequence[jax.Array], multiple: int) -> jax.Array:
    """Returns [length], the leaves one after the other in their dtype (float32 at least), then zeros up to a
    multiple."""
    dtype = common_dtype(*(x.dtype for x in leaves), jnp.float32)
    buffer = jnp.concatenate([x.astype(dtype).reshape(-1) for x in leaves])
    return jnp.pad(buffer, (0, -len(buffer) % multiple))


def unflatten(buffer: jax.Array, like: Sequence[jax.Array], dtype: Any = None) -> Leaves:
    """Returns the leaves of a flat buffer, shaped (and unless `dtype` is given, typed) as `like`."""
    ends = [0]
    for leaf in like:
        ends.append(ends[-1] + math.prod(leaf.shape))
    return [
        buffer[start:end].reshape(leaf.shape).astype(dtype or leaf.dtype)
        for leaf, start, end in zip(like, ends, ends[1:], strict=False)
    ]


def exchange_parts(parts: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns [replicas, part]: part r of every replica, on replica r. `parts` is [replicas, part], the replica's
    own."""
    return lax.all_to_all(parts, axes, 0, 0, tiled=True)


def gather_parts(part: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns [replicas * part], the parts of all replicas in their order, typed as the same on each of them."""
    return compat.all_gather_invarying(part, axes)
