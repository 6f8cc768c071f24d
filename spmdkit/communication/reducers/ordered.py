"""The sum over the replica axes in replica order: bitwise equal for any order of devices and processes.

    part_r[N, b] -> all_to_all -> [N, b] of one part -> sum over N, first to last -> all_gather -> g

The order of additions in an all-reduce, and so its last bits, depend on the links, the order of devices, the number of
processes and the library version. This reducer adds in mesh order, also loss, counts, metrics and model state.

Use it to compare runs bitwise across machines. It is slower than `sum`: it sends the same bytes in two collectives
without hardware reduction, and copies the gradient into a buffer.
Wire: `2 (N-1)/N * 4 bytes` per value (float64: 8), device and step, of the values padded to a multiple of `1,024 N`.
Source: the two halves of a ring all-reduce, with the additions of each part on its owner; Demmel and Nguyen, "Parallel
reproducible summation" (2015), on the order of additions.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    flatten,
    gather_parts,
    group_by_axes,
    map_buffers,
    unflatten,
)


def make() -> Reducer:
    """Returns the reducer."""

    def apply(leaves: Leaves, states: list[LeafState], over: ReduceGroup) -> tuple[Leaves, list[LeafState]]:
        def total(group: Leaves, group_states: list[LeafState]) -> tuple[Leaves, list[LeafState]]:
            parts = flatten(group, over.num * PAD).reshape(over.num, -1)
            of_replicas = lax.all_to_all(parts, over.axes, 0, 0, tiled=True)
            return unflatten(gather_parts(_in_order(of_replicas), over.axes), group), group_states

        return map_buffers(leaves, states, total)

    return Reducer(exact=True, apply=apply, wire=_wire, wire_of=_wire_of, add=add)


def _wire(values: int, num: int) -> float:
    return 2 * (num - 1) / num * 4 * (values + -values % (num * PAD))


def _wire_of(leaves: Sequence[ReducedLeaf]) -> float:
    groups = group_by_axes(leaves)
    return sum(_wire(sum(leaf.size for leaf in group), group[0].num) * group[0].value_bytes / 4 for group in groups)


def add(tree: Any, axes: tuple[str, ...]) -> Any:
    """Returns the sum of a small tree, added on every replica in replica order: one all_gather per dtype."""
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))

    def total(group: Leaves, group_states: list[LeafState]) -> tuple[Leaves, list[LeafState]]:
        buffer = jnp.concatenate([x.reshape(-1) for x in group])
        return unflatten(_in_order(gather_parts(buffer[None], axes)), group), group_states

    return jax.tree.unflatten(structure, map_buffers(leaves, [{}] * len(leaves), total)[0])


def _in_order(parts: jax.Array) -> jax.Array:
    """Returns `((p_0 + p_1) + p_2) + ...` of [N, ...]. It is a loop, since XLA may regroup the terms of a reduction."""
    return lax.scan(lambda total, part: (total + part, None), parts[0], parts[1:])[0]
