"""Adaptive summation: parallel gradients are averaged, orthogonal gradients are added, leaf by leaf.

    adasum(a, b) = (1 - a.b / 2 |a|^2) a + (1 - a.b / 2 |b|^2) b     in a tree: (0,1) (2,3), then (01,23)

The result replaces the mean. Its norm is larger than that of the mean if replicas differ, so use the learning rate of
one replica, not of N. The tree follows the order of replicas in the mesh, and their number must be a power of two. Dot
products are over complete leaves, including leaves sharded over model axes.

Each replica owns a part of every leaf and receives this part from all replicas. One small all_reduce per tree level
adds the dot products of the parts. Each owner then combines its part.

Use it for many replicas if a larger learning rate or batch no longer converges. Each replica contributes its local
mean, so in a short batch an example weighs more on a replica with fewer examples. It does not support ZeRO 2, which
adds shards before the local mean is known.
Wire: all_to_all, log2(N) all_reduces, all_gather over the replica axes. With `p` the sum over leaves of `V / N` rounded
up, rounded up to a multiple of 1,024, a device sends `2 (N-1) * 4 p` bytes in a step, and `8 (N-1)/N * 3 (N-1)` for
each leaf.
Source: Maleki et al., "Scaling distributed training with adaptive summation" (2021), equation 4 and algorithm 1;
Horovod, adasum.h (order of the tree, zeros: a gradient with norm zero has the factor one).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit import compat
from spmdkit.communication.reducers.base import (
    PAD,
    LeafState,
    Leaves,
    ReducedLeaf,
    ReduceGroup,
    Reducer,
    gather_parts,
    group_by_axes,
    map_buffers,
)
from spmdkit.errors import ConfigError


def make() -> Reducer:
    """Returns the reducer."""

    def apply(leaves: Leaves, states: list[LeafState], over: ReduceGroup) -> tuple[Leaves, list[LeafState]]:
        return map_buffers(leaves, states, lambda group, group_states: (_reduce_group(group, over), group_states))

    def wire_of(added: Sequence[ReducedLeaf]) -> float:
        sent = 0.0
        for group in group_by_axes(added):
            num = group[0].num
            part = sum(-(-leaf.size // num) for leaf in group)
            sent += 8 * (num - 1) * (part + -part % PAD) + 8 * (num - 1) / num * 3 * (num - 1) * len(group)
        return sent

    return Reducer(
        exact=False,
        apply=apply,
        wire=lambda values, num: wire_of([ReducedLeaf("", (values,), {"data": num}, ())]),
        wire_of=wire_of,
        input_scale="mean",
        check=_check,
    )


def _check(added: Sequence[ReducedLeaf]) -> None:
    for leaf in added:
        if leaf.num & (leaf.num - 1):
            axes = " x ".join(f"{axis} {size}" for axis, size in leaf.axes.items())
            below = 1 << (leaf.num.bit_length() - 1)
            raise ConfigError(
                f"reducer: adasum combines replicas in pairs, and {leaf.path!r} is reduced over {axes}: {leaf.num} "
                f"replicas are not a power of two. Try {below} replicas, or {2 * below}, or reducer: sum."
            )
        if leaf.reduced_before:
            raise ConfigError(
                f"reducer: adasum needs the mean of each replica, and layout.zero: 2 reduces {leaf.path!r} over "
                f"{leaf.reduced_before[0]} before it, so that mean is not available. Write layout: {{zero: 1}}, or "
                "reducer: sum."
            )


def _reduce_group(leaves: Sequence[jax.Array], over: ReduceGroup) -> Leaves:
    """Returns the adaptive sums of leaves that share a buffer."""
    num, lengths = over.num, [-(-x.size // over.num) for x in leaves]
    rows = [_rows(x.astype(jnp.float32), num) for x in leaves]
    buffer = jnp.concatenate(rows, 1)
    buffer = jnp.pad(buffer, [(0, 0), (0, -buffer.shape[1] % PAD)])
    # [replicas, part]: the part that this replica owns, from every replica
    parts = lax.all_to_all(buffer, over.axes, 0, 0, tiled=True)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    all_axes = (*over.axes, *sorted(compat.varying_axes(leaves[0]) - set(over.axes)))
    while parts.shape[0] > 1:
        a, b = parts[0::2], parts[1::2]
        dots = jnp.stack([_dots(x, y, starts, lengths) for x, y in ((a, b), (a, a), (b, b))])
        both, of_a, of_b = lax.psum(dots, all_axes)  # [pairs, leaves] each
        of_a, of_b = (_spread(1 - half_projection(both, squares), lengths, a.shape[1]) for squares in (of_a, of_b))
        parts = of_a * a + of_b * b
    gathered = gather_parts(parts[0], over.axes).reshape(num, -1)
    return [
        gathered[:, start : start + length].reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype)
        for x, start, length in zip(leaves, starts, lengths, strict=True)
    ]


def _rows(x: jax.Array, num: int) -> jax.Array:
    """Returns [num, size / num rounded up]: one row per owner."""
    return jnp.pad(x.reshape(-1), (0, -x.size % num)).reshape(num, -1)


def _dots(a: jax.Array, b: jax.Array, starts: Sequence[int], lengths: Sequence[int]) -> jax.Array:
    """Returns [pairs, leaves], the dot products of the parts of each leaf."""
    ends = zip(starts, lengths, strict=True)
    return jnp.stack([(a[:, s : s + n] * b[:, s : s + n]).sum(1) for s, n in ends], 1)


def half_projection(dot: jax.Array, square: jax.Array) -> jax.Array:
    """Returns a.b / 2 |a|^2, or 0 for a vector of zeros."""
    return jnp.where(square > 0, dot / (2 * jnp.where(square > 0, square, 1)), 0)


def _spread(factors: jax.Array, lengths: Sequence[int], part: int) -> jax.Array:
    """Returns [pairs, part] from [pairs, leaves]: the factor of each value's leaf."""
    pairs = factors.shape[0]
    each = [jnp.broadcast_to(factors[:, i : i + 1], (pairs, n)) for i, n in enumerate(lengths)]
    return jnp.pad(jnp.concatenate(each, 1), [(0, 0), (0, part - sum(lengths))])
