"""Two-level reduction: an exact sum within each position along `replica`, on fast links, and a second reducer between
positions, on slow links, with a fraction of the bytes.

    g[D F] -> reduce_scatter over data -> g[D F/data] -> outer over replica, on the shard -> all_gather over data ->
    g[D F]

Each device passes `1 / size(inner)` of the gradient to the outer reducer. The state belongs to the shard. The inner
axes are all replica axes except `replica`: `data`, with ZeRO 1 and 2 also `fsdp`. A leaf without a dim divisible by
their size (a bias of three) is reduced by one exact sum over all axes. If `data` is 1, leaves that ZeRO 2 shards over
`fsdp` are already shards, and only `outer` reduces them.

Use it with fast links within slices or hosts and slow links between them: mesh {replica: slices, data: chips of a
slice}. It is rejected if either size is 1, since the outer reducer alone is then equivalent.
Memory: that of `outer`, divided by the size of inner.
Wire: for V values, with n the size of inner: over inner `2 (n-1)/n * 4 V` bytes, over `replica` the bytes of `outer`
for `V / n` values.
Source: Jia et al., "Highly scalable deep learning training system with mixed-precision" (2018), section 3.3,
hierarchical all-reduce; Wang et al., "ZeRO++" (2023), section 3.3, gradients quantized only between nodes.
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

from spmdkit.communication.options import check_option
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
    unflatten,
)
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins

Choice = str | dict[str, Any]
LANES = 128
"""Number of values in a row of a TPU tile."""


def make(inner: str = "sum", outer: Choice = "int8") -> Reducer:
    """Returns the reducer.

    Args:
        inner: the reduction within a position, always `sum`.
        outer: the reducer between positions along `replica`, with its options: `int8`, `{topk: {fraction: 0.05}}`.
    """
    rule = "The inner reduction is exact, a reduce_scatter. Write inner: sum."
    check_option(inner == "sum", "hierarchical.inner", inner, rule)
    name, between = _outer(outer)
    options = plugins.split(outer)[1]

    def wire_of(leaves: Sequence[ReducedLeaf]) -> float:
        inside = 0.0
        for leaf in leaves:
            num = math.prod(leaf.axes[a] for a in inner_axes(tuple(leaf.axes)))
            total = num if shard_dim(leaf.shape, num) is not None else leaf.num
            inside += 2 * (total - 1) / total * leaf.value_bytes * leaf.size
        return inside + between.bytes_sent(_as_shards(leaves))

    def check(leaves: Sequence[ReducedLeaf]) -> None:
        _check_axes({axis: size for leaf in leaves for axis, size in leaf.axes.items()}, name)
        between.check(_as_shards(leaves))

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
        exact_options=None if between.exact else {"outer": {name: options | dict(between.exact_options or {})}},
    )


def _apply(
    between: Reducer, leaves: Leaves, states: list[LeafState], over: ReduceGroup
) -> tuple[Leaves, list[LeafState]]:
    """Returns (sums, new states): inner reduce_scatter, `between` on the shards, inner all_gather."""
    axes = inner_axes(over.axes)
    num = math.prod(lax.axis_size(a) for a in axes)
    outside = dataclasses.replace(over, axes=("replica",), num=over.num // num)
    if num == 1:
        return between.apply(leaves, states, outside)
    dims = [shard_dim(x.shape, num) for x in leaves]
    undivided = [i for i, dim in enumerate(dims) if dim is None]
    out, new = list(leaves), list(states)
    for i, total in zip(undivided, lax.psum([leaves[i] for i in undivided], over.axes), strict=True):
        out[i] = total
    divided = [i for i, dim in enumerate(dims) if dim is not None]
    for group in buffer_groups([leaves[i] for i in divided]):
        pairs = [(i, dims[i] or 0) for i in (divided[j] for j in group)]
        shards = _scatter([jnp.moveaxis(leaves[i], dim, 0) for i, dim in pairs], num, axes)
        shards = [jnp.moveaxis(x, 0, dim) for x, (_, dim) in zip(shards, pairs, strict=True)]
        paths = tuple(over.paths[i] for i, _ in pairs) if over.paths else ()
        shards, kept = between.apply(shards, [states[i] for i, _ in pairs], dataclasses.replace(outside, paths=paths))
        totals = _gather([jnp.moveaxis(x, dim, 0) for x, (_, dim) in zip(shards, pairs, strict=True)], num, axes)
        for (i, dim), total, state in zip(pairs, totals, kept, strict=True):
            out[i], new[i] = jnp.moveaxis(total, 0, dim), state
    return out, new


def _outer(choice: Choice) -> tuple[str, Reducer]:
    is_choice = isinstance(choice, str) or (isinstance(choice, dict) and len(choice) == 1)
    rule = "It is the name of a reducer, or a mapping from a name to options. Write outer: int8."
    check_option(is_choice, "hierarchical.outer", choice, rule)
    name, options = plugins.split(choice)
    if plugins.is_reference(choice) or name in ("hierarchical", "adasum"):
        raise ConfigError(
            f"hierarchical.outer is {name}: between positions along replica a reducer of the package with input_scale "
            f"weighted is needed, and {name} is not one. Write outer: int8."
        )
    if isinstance(options, dict) and "warmup" in options:
        raise ConfigError(
            f"hierarchical.outer: {name} has warmup: {options['warmup']!r}, and warm-up applies to the whole reducer. "
            f"Write {{hierarchical: {{outer: {name}, warmup: {options['warmup']!r}}}}}."
        )
    if wrong := plugins.problem("reducers", choice):
        raise ConfigError(f"hierarchical.outer: {wrong}")
    reducer: Reducer = plugins.make("reducers", choice)
    if reducer.apply_with_metrics is not None:
        raise ConfigError(
            f"hierarchical.outer is {name}: its bytes depend on the gradient and are a metric, and metrics of an "
            f"outer reducer cannot be logged. Write outer: int8, or reducer: {name} alone."
        )
    return name, reducer


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


def _as_shards(leaves: Sequence[ReducedLeaf]) -> list[ReducedLeaf]:
    shards = []
    for leaf in leaves:
        num = math.prod(leaf.axes[a] for a in inner_axes(tuple(leaf.axes)))
        dim = shard_dim(leaf.shape, num)
        if "replica" in leaf.axes and dim is not None:
            shape = tuple(n // num if i == dim else n for i, n in enumerate(leaf.shape))
            shards.append(leaf._replace(shape=shape, axes={"replica": leaf.axes["replica"]}, reduced_before=()))
    return shards


def _scatter(leaves: Leaves, num: int, axes: tuple[str, ...]) -> Leaves:
    """Returns this device's shard, along the first dim, of the sum of each leaf over `axes`: one reduce_scatter.

    Rows have 128 values, since the TPU compiler uses an all_reduce for a few long rows (libtpu 0.0.42, v5e).
    """
    rows = jnp.concatenate([x.reshape(num, -1) for x in leaves], 1)
    rows = jnp.pad(rows, [(0, 0), (0, -rows.shape[1] % PAD)])
    shard = lax.psum_scatter(rows.reshape(-1, LANES), axes, scatter_dimension=0, tiled=True)
    shards = [jax.ShapeDtypeStruct((x.shape[0] // num, *x.shape[1:]), x.dtype) for x in leaves]
    return unflatten(shard.reshape(-1), shards)


def _gather(shards: Leaves, num: int, axes: tuple[str, ...]) -> Leaves:
    """Returns the complete leaves from shards along the first dim: one all_gather."""
    row = jnp.concatenate([x.reshape(-1) for x in shards])
    rows = gather_parts(jnp.pad(row, (0, -len(row) % PAD)), axes).reshape(num, -1)
    out, start = list[jax.Array](), 0
    for x in shards:
        out.append(rows[:, start : start + x.size].reshape(num * x.shape[0], *x.shape[1:]))
        start += x.size
    return out
