"""Two levels: an exact sum within each position along `replica`, on fast links, and a second reducer between positions,
on slow links, for a fraction of the bytes.

    g[D F] -> reduce_scatter over data -> g[D F/data] -> outer over replica, on the shard -> all_gather over data -> g[D
    F]

Each device passes `1 / size(inner)` of the gradient to the outer reducer. The outer state belongs to the shard: the
train state shards it over the inner axes, so it takes `1 / size(inner)` of the memory. The inner axes are all replica
axes except `replica`: `data`, with ZeRO 1 and 2 also `fsdp`. A leaf without a dim divisible by their size (a bias of
three) is reduced by one exact sum over all axes.

Use it on slices or hosts with fast links inside and slow links between: mesh {replica: slices, data: chips of a slice}.
It is rejected where either is 1: the outer reducer alone does the same. What ZeRO 2 has sharded over `fsdp` where
`data` is 1 is a shard already: only `outer` reduces it.
Memory: that of `outer`, divided by the size of inner.
Forward: reduce_scatter over inner, the outer's collectives over `replica`, all_gather over inner. Backward: none. Wire:
of V values, with n the size of inner: over inner `2 (n-1)/n * 4 V` bytes, over `replica` what `outer` sends for `V / n`
values.
Source: Jia et al., "Highly scalable deep learning training system with mixed-precision" (2018), section 3.3,
hierarchical all-reduce; Wang et al., "ZeRO++" (2023), section 3.3, quantised gradients between nodes alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit.communication.reducers.base import (
    PAD,
    LeafState,
    Leaves,
    ReducedLeaf,
    ReduceGroup,
    Reducer,
    buffer_groups,
    gather_parts,
    inner_axes,
    shard_dim,
)
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins

Choice = str | dict[str, Any]
LANES = 128
"""Values in a row of a TPU's tile."""


def make(inner: str = "sum", outer: Choice = "int8") -> Reducer:
    """Returns the reducer.

    Args:
        inner: how shards are added within a position: `sum`.
        outer: the reducer between the positions along `replica`, with its options: `int8`, `{topk: {fraction: 0.05}}`.

    Raises:
        ConfigError: `inner` is not `sum`, or `outer` cannot be used between positions.
    """
    if inner != "sum":
        raise ConfigError(
            f"hierarchical.inner is {inner!r}. The inner reduction is exact, a reduce_scatter. Write inner: sum."
        )
    name, between = _outer(outer)

    def wire_of(leaves: Sequence[ReducedLeaf]) -> float:
        inside = 0.0
        for leaf in leaves:
            num = math.prod(leaf.axes[a] for a in inner_axes(tuple(leaf.axes)))
            total = num if shard_dim(leaf.shape, num) is not None else leaf.num
            inside += 2 * (total - 1) / total * leaf.value_bytes * leaf.size
        return inside + between.bytes_sent([x for leaf in leaves if (x := _as_shard(leaf))])

    def check(leaves: Sequence[ReducedLeaf]) -> None:
        sizes = {axis: size for leaf in leaves for axis, size in leaf.axes.items()}
        _check_axes(sizes, name)
        between.check([x for leaf in leaves if (x := _as_shard(leaf))])

    return Reducer(
        exact=between.exact,
        apply=functools.partial(_apply, between),
        wire=lambda values, num: 8 * (num - 1) / num * values,
        wire_of=wire_of,
        init=between.init,
        reshard_state=between.reshard_state,
        per_shard_state=True,
        input_scale="weighted",
        check=check,
        exact_options=None
        if between.exact
        else {"outer": {name: plugins.split(outer)[1] | dict(between.exact_options or {})}},
    )


def _apply(
    between: Reducer, leaves: Leaves, states: list[LeafState], over: ReduceGroup
) -> tuple[Leaves, list[LeafState]]:
    """Returns (the sums, the new states): a reduce_scatter inside, `between` on the shards, an all_gather inside."""
    axes = inner_axes(over.axes)
    num = math.prod(lax.axis_size(a) for a in axes)
    outside = dataclasses.replace(over, axes=("replica",), num=over.num // num)
    if num == 1:
        return between.apply(leaves, states, outside)
    dims = [shard_dim(x.shape, num) for x in leaves]
    whole = [i for i, dim in enumerate(dims) if dim is None]
    out, new = list(leaves), list(states)
    for i, total in zip(whole, lax.psum([leaves[i] for i in whole], over.axes), strict=True):
        out[i] = total
    chosen = [i for i, dim in enumerate(dims) if dim is not None]
    cut = [_Sharding(leaves[i].shape, dims[i] or 0, num) for i in chosen]
    for group in buffer_groups([leaves[i] for i in chosen]):
        of_group, of_leaf = [cut[j] for j in group], [chosen[j] for j in group]
        shards = _scatter([leaves[i] for i in of_leaf], of_group, axes)
        paths = tuple(over.paths[i] for i in of_leaf) if over.paths else ()
        shards, kept = between.apply(shards, [states[i] for i in of_leaf], dataclasses.replace(outside, paths=paths))
        for i, leaf, state in zip(of_leaf, _gather(shards, of_group, axes), kept, strict=True):
            out[i], new[i] = leaf, state
    return out, new


def _outer(choice: Choice) -> tuple[str, Reducer]:
    """Returns the name of `outer` and its reducer."""
    if not isinstance(choice, str | dict) or (isinstance(choice, dict) and len(choice) != 1):
        raise ConfigError(
            f"hierarchical.outer is {choice!r}. It is the name of a reducer, or a mapping from a name to options. "
            "Write outer: int8."
        )
    name, options = plugins.split(choice)
    fits = "between positions along replica a reducer of the package with input_scale weighted is needed"
    if plugins.is_reference(choice) or name in ("hierarchical", "adasum"):
        raise ConfigError(f"hierarchical.outer is {name}: {fits}, and {name} is not one. Write outer: int8.")
    if isinstance(options, dict) and "warmup" in options:
        raise ConfigError(
            f"hierarchical.outer: {name} has warmup: {options['warmup']!r}, and warm-up applies to the whole reducer. "
            f"Write {{hierarchical: {{outer: {name}, warmup: {options['warmup']!r}}}}}."
        )
    if wrong := plugins.problem("reducers", choice):
        raise ConfigError(f"hierarchical.outer: {wrong}")
    made: Reducer = plugins.make("reducers", choice)
    if made.apply_with_metrics is not None:
        raise ConfigError(
            f"hierarchical.outer is {name}: its bytes depend on the gradient and are a metric, and metrics of an "
            f"outer reducer cannot be logged. Write outer: int8, or reducer: {name} alone."
        )
    return name, made


def _check_axes(sizes: Mapping[str, int], name: str) -> None:
    if "replica" not in sizes:
        other = next(iter(sizes))
        raise ConfigError(
            "reducer: hierarchical has no effect over replica: gradients are reduced only over "
            f"{' x '.join(f'{a} {n}' for a, n in sizes.items())}, so {name} would never run. Try mesh: "
            f"{{replica: 2, {other}: {max(sizes[other] // 2, 1)}}}, or reducer: sum."
        )
    if len(sizes) == 1:
        raise ConfigError(
            f"reducer: hierarchical: gradients are reduced over replica {sizes['replica']} alone. There is no data "
            f"axis within it, so nothing is sharded. Try reducer: {name}, or mesh: "
            f"{{replica: 2, data: {max(sizes['replica'] // 2, 2)}}}."
        )


def _as_shard(leaf: ReducedLeaf) -> ReducedLeaf | None:
    """Returns the shard of a leaf that the outer reducer receives, or None."""
    num = math.prod(leaf.axes[a] for a in inner_axes(tuple(leaf.axes)))
    dim = shard_dim(leaf.shape, num)
    if "replica" not in leaf.axes or dim is None:
        return None
    shape = tuple(n // num if i == dim else n for i, n in enumerate(leaf.shape))
    return leaf._replace(shape=shape, axes={"replica": leaf.axes["replica"]}, before=())


# ---- shards


@dataclasses.dataclass(frozen=True)
class _Sharding:
    """A leaf that is split into `num` shards along `dim`."""

    shape: tuple[int, ...]
    dim: int
    num: int

    @property
    def size(self) -> int:
        """Values of a shard."""
        return math.prod(self.shape) // self.num

    def rows(self, leaf: jax.Array) -> jax.Array:
        """Returns [num, size], one shard per row."""
        return jnp.moveaxis(leaf, self.dim, 0).reshape(self.num, -1)

    def leaf(self, rows: jax.Array) -> jax.Array:
        """Returns the leaf of [num, size], or the shard of [1, size]."""
        length = self.shape[self.dim] // self.num * rows.shape[0]
        others = [n for i, n in enumerate(self.shape) if i != self.dim]
        return jnp.moveaxis(rows.reshape(length, *others), 0, self.dim)


def _scatter(leaves: Sequence[jax.Array], cuts: Sequence[_Sharding], axes: tuple[str, ...]) -> Leaves:
    """Returns this device's shard of the sum of each leaf over `axes`: one reduce_scatter.

    In rows of 128 values: for a few long rows the TPU compiler makes an all_reduce (libtpu 0.0.42, v5e).
    """
    rows = jnp.concatenate([cut.rows(x) for x, cut in zip(leaves, cuts, strict=True)], 1)
    rows = jnp.pad(rows, [(0, 0), (0, -rows.shape[1] % PAD)])
    own = lax.psum_scatter(rows.reshape(-1, LANES), axes, scatter_dimension=0, tiled=True)
    return _leaves(own.reshape(1, -1), cuts)


def _gather(shards: Sequence[jax.Array], cuts: Sequence[_Sharding], axes: tuple[str, ...]) -> Leaves:
    """Returns the whole leaves from the shards of the devices along `axes`: one all_gather."""
    row = jnp.concatenate([jnp.moveaxis(x, cut.dim, 0).reshape(-1) for x, cut in zip(shards, cuts, strict=True)])
    row = jnp.pad(row, (0, -len(row) % PAD))
    return _leaves(gather_parts(row, axes).reshape(cuts[0].num, -1), cuts)


def _leaves(rows: jax.Array, cuts: Sequence[_Sharding]) -> Leaves:
    out, start = [], 0
    for cut in cuts:
        out.append(cut.leaf(rows[:, start : start + cut.size]))
        start += cut.size
    return out
