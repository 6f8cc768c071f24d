"""The `Reducer` interface: how the gradients of all replicas are reduced. Each module in this folder defines one
reducer, `make(**options) -> Reducer`, and is loaded by name. An option out of range raises `ConfigError`."""

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
"""name -> float32[], equal on every device of the mesh: metrics that a reducer reports for one step."""
LeafShapes = Mapping[str, jax.ShapeDtypeStruct]

METRIC_PREFIX = "reducer/"
"""The prefix of the names of reducer metrics."""

PAD = 1024
"""The number of values per replica in a buffer is a multiple of this. The TPU compiler turns shorter gathers into
all-reduces (libtpu 0.0.42)."""


@dataclass(frozen=True)
class ReduceGroup:
    """The replicas of one call of `apply`, which runs inside a `shard_map` that is manual over all mesh axes.

    Attributes:
        axes: mesh axes to reduce over. Pass all of them to every collective, including axes of size one, since the
            result must be typed as invariant along each axis.
        num: the product of the axis sizes, at least 2.
        key: returns the random key of this step, equal on every replica; fold in `lax.axis_index(axes)` for a key per
            replica.
        paths: paths of the leaves, in order; empty if the leaves have no paths.
    """

    axes: tuple[str, ...]
    num: int
    key: Callable[[], jax.Array]
    paths: tuple[str, ...] = ()


class ReducedLeaf(NamedTuple):
    """Static description of a gradient leaf that is reduced over replicas, known before the first step.

    Attributes:
        path: path of the parameter.
        shape: shape of one device's shard.
        axes: replica axis -> size, for the axes larger than one over which the leaf is reduced.
        cut: mesh axes that shard the leaf. Leaves with the same axes share a buffer.
        before: replica axes over which ZeRO 2 reduces the leaf before the reducer runs.
        value_bytes: bytes of an uncompressed value: 4, or 8 with gradients in float64.
    """

    path: str
    shape: tuple[int, ...]
    axes: Mapping[str, int]
    sharded_over: tuple[str, ...]
    reduced_before: tuple[str, ...] = ()
    value_bytes: int = 4

    @property
    def num(self) -> int:
        """The number of replicas over which the leaf is reduced."""
        return math.prod(self.axes.values())

    @property
    def size(self) -> int:
        """Number of values on one device."""
        return math.prod(self.shape)

    @property
    def allreduce_bytes(self) -> float:
        """Bytes that one device sends for the leaf in a ring all-reduce, or in a reduce_scatter and an all_gather."""
        return 2 * (self.num - 1) / self.num * self.value_bytes * self.size


def group_by_axes(leaves: Sequence[ReducedLeaf]) -> list[list[ReducedLeaf]]:
    """Returns the leaves grouped by the axes over which they are reduced."""
    groups: dict[Any, list[ReducedLeaf]] = {}
    for leaf in leaves:
        groups.setdefault(tuple(leaf.axes), []).append(leaf)
    return list(groups.values())


def stateless(leaf: jax.ShapeDtypeStruct) -> LeafShapes:
    """Returns an empty state."""
    return {}


def split_evenly(state: LeafState, num: int) -> dict[str, jax.Array]:
    """Returns [num, ...] from [old, ...] with the same sum over replicas, which preserves the error feedback."""
    return {name: jnp.broadcast_to(x.sum(0) / num, (num, *x.shape[1:])).astype(x.dtype) for name, x in state.items()}


@dataclass(frozen=True)
class Reducer:
    """How gradients are reduced over replicas.

    Attributes:
        exact: the result is the sum up to rounding in the dtype of the leaves. `verify` compares exact reducers bitwise
            over replicas and with one device. For an inexact reducer `verify` uses its `exact_options` or `sum`, and
            the reducer's contract test bounds its error.
        apply: `(leaves, states, over) -> (leaves, states)`.
            leaves: this device's shard of each leaf of one replica's gradient, [*shard of the leaf], in float32 or
                wider; for `sum` in `precision.reduction`. These are some of the tree's leaves, in flattening order: a
                step may call `apply` several times, over different axes (ZeRO 2). The results have the same shapes and
                dtypes, are summed over `over.axes`, bitwise equal on every replica and typed as invariant: end with
                `psum` or `gather_parts`.
            states: one mapping per leaf, with the arrays of `init`, [*shard of the leaf], typed varying along
                `over.axes`. Float32 for leaves of any dtype.
            Each message may depend on one buffer only: never mix leaves that vary over different mesh axes
            (`buffer_groups`).
            Called once per leaf and step, after the last microbatch, never in a loop.
        wire: `(values, replicas) -> bytes` that one device sends. This is the documented formula, and tests compare it
            with the compiled program.
        wire_of: `(leaves) -> bytes`, if the bytes depend on the shapes of the leaves or on the axes. `wire` is then an
            upper bound.
        init: shapes of one replica's state for one leaf, initially zeros. Every array has the leaf's shape. The train
            state stores it as [replicas of the leaf, *leaf], sharded like the gradient of the leaf, so that it can be
            restored on any mesh.
        reshard_state: converts the state of one leaf to another number of replicas, [old, *leaf] -> [num, *leaf]. Runs
            in a compiled program, leaf by leaf.
        input_scale: the scale of the leaves.
            "sum": sums. The step divides once, after the reduction, by the count of the global batch (`sum`,
                `ordered`).
            "weighted": this replica's part of the mean, divided by the count of the global batch before the reduction.
                Required for reducers that are nonlinear or have a state, since the count of the next batch may differ.
            "mean": this replica's local mean. The result is final (Adasum).
        per_shard_state: the state belongs to shards of a leaf, one per position along the replica axes other than
            `replica`. The state is sharded over these axes along `shard_dim` of the leaf. A leaf without such a dim has
            no state.
        add: `(tree, axes) -> tree`, the exact sum of all other values: loss, counts, metrics and model state.
        warmup: number of initial steps that use `sum` and do not change the state. They run a second program, selected
            on the host. In a config it is an option of every reducer: `{bfloat16: {warmup: 100}}`.
        check: `(leaves)`: raises a `ConfigError` if the reducer cannot reduce these leaves, or would not send fewer
            bytes than `sum`. The message names the setting, the cause, and the smallest change that works.
        exact_options: options at which the result equals `sum` (full rank, fraction 1), or None.
        apply_with_metrics: `apply` with a third result, `ReducerMetrics`: metrics of the step, `reducer/NAME`. If it is
            set, the step calls it instead of `apply`. A reducer with metrics cannot be the `outer` reducer of
            `hierarchical`, where the metrics could not be logged.
        validate_first_step: `(leaves, name -> number)`: raises a `ConfigError` if the metrics of the reducer's first
            step show a wrong configuration.
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
    check: Callable[[Sequence[ReducedLeaf]], None] = lambda leaves: None
    exact_options: Mapping[str, Any] | None = None
    apply_with_metrics: (
        Callable[[Leaves, list[LeafState], ReduceGroup], tuple[Leaves, list[LeafState], ReducerMetrics]] | None
    ) = None
    validate_first_step: Callable[[Sequence[ReducedLeaf], Mapping[str, float]], None] | None = None

    def __post_init__(self) -> None:
        if self.init is not stateless and self.input_scale == "sum":
            raise ValueError(
                "a reducer with a state needs input_scale weighted: the count of the next batch may differ, and the "
                "state of sums would have another scale"
            )

    def bytes_sent(self, leaves: Sequence[ReducedLeaf]) -> float:
        """Returns the bytes that one device sends for these leaves."""
        if self.wire_of is not None:
            return self.wire_of(leaves)
        return sum(self.wire(sum(leaf.size for leaf in group), group[0].num) for group in group_by_axes(leaves))

    @property
    def is_sum(self) -> bool:
        """Whether gradients are reduced like all other values. A step that never calls `sk.value_and_grad` is then
        still correct."""
        return self.exact and self.input_scale == "sum" and self.add is lax.psum and self.apply_with_metrics is None


def inner_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the replica axes within one position along `replica`."""
    return tuple(a for a in axes if a != "replica")


def shard_dim(shape: Sequence[int], num: int) -> int | None:
    """Returns the first dim of (one device's shard of) a leaf that `num` divides, or None."""
    return next((dim for dim, size in enumerate(shape) if size and size % num == 0), None)


def value_bytes(dtype: Any) -> int:
    """Returns the bytes of an uncompressed gradient value, at least those of float32."""
    result: int = max(4, jnp.dtype(dtype).itemsize)
    return result


def buffer_groups(leaves: Sequence[jax.Array]) -> list[list[int]]:
    """Returns the indices of the leaves that may share a buffer: they vary over the same mesh axes and have the same
    dtype."""
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault((compat.varying_axes(leaf), leaf.dtype), []).append(i)
    return list(groups.values())


def map_buffers(
    leaves: Sequence[jax.Array],
    states: Sequence[LeafState],
    fn: Callable[[Leaves, list[LeafState]], tuple[Leaves, Sequence[LeafState]]],
) -> tuple[Leaves, list[LeafState]]:
    """Returns the leaves and states after applying `fn` to those of each buffer (`buffer_groups`)."""
    out, new = list(leaves), list(states)
    for group in buffer_groups(leaves):
        results = fn([leaves[i] for i in group], [states[i] for i in group])
        for i, leaf, state in zip(group, *results, strict=True):
            out[i], new[i] = leaf, state
    return out, new


def flatten(leaves: Sequence[jax.Array], multiple: int) -> jax.Array:
    """Returns [length]: the concatenated leaves in their common dtype (at least float32), zero-padded to a multiple."""
    dtype = common_dtype(*(x.dtype for x in leaves), jnp.float32)
    buffer = jnp.concatenate([x.astype(dtype).reshape(-1) for x in leaves])
    return jnp.pad(buffer, (0, -len(buffer) % multiple))


def unflatten(buffer: jax.Array, like: Sequence[jax.Array | jax.ShapeDtypeStruct], dtype: Any = None) -> Leaves:
    """Returns the leaves of a flat buffer with the shapes of `like`, and with its dtypes unless `dtype` is set."""
    ends = [0]
    for leaf in like:
        ends.append(ends[-1] + math.prod(leaf.shape))
    return [
        buffer[start:end].reshape(leaf.shape).astype(dtype or leaf.dtype)
        for leaf, start, end in zip(like, ends, ends[1:], strict=False)
    ]


def gather_parts(part: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns [replicas * part]: the parts of all replicas in replica order, typed as invariant."""
    return compat.all_gather_invarying(part, axes)
