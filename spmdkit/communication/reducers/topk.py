"""Sends the largest values of the gradient with their indices. The other values are added to the next step's gradient.

    c_r = g_r / C + e_r,   indices = the k largest |c_r|,   g = sum_r c_r[indices of r],   e_r = c_r except at indices

The gradient is flattened into one vector (one per set of mesh axes over which leaves are sharded), and the largest
values are selected across all leaves. Values and indices are sent as one array of 32-bit integers, and added in replica
order, so that the result is bitwise equal on all replicas.

Use it on slow links if few values dominate the gradient (large embeddings, late in training). The received bytes grow
with the number of replicas. By default it is rejected unless `N k` is below half of the gradient's values, which is
half of the bytes of `sum`.
Memory: 4 bytes per value on each replica, in the train state.
Wire: one all_gather over the replica axes. With `L` the values rounded up to a multiple of 1,024, and `k = fraction *
L` rounded down to a multiple of 1,024, a device sends `8 (N-1) k` bytes in a step: `N k / V` of `sum`, 0.08 for 1 % and
8 replicas. A vector with k zero, or that would exceed `most`, is reduced as by `sum`: `8 (N-1)/N V`.
Source: Aji and Heafield, "Sparse communication for distributed gradient descent" (2017); Stich et al., "Sparsified SGD
with memory" (2018), algorithm 1; Lin et al., "Deep gradient compression" (2018), section 3, without its momentum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit import compat
from spmdkit.communication.options import check_option, is_number
from spmdkit.communication.reducers.base import (
    PAD,
    LeafState,
    Leaves,
    ReducedLeaf,
    ReduceGroup,
    Reducer,
    flatten,
    gather_parts,
    map_buffers,
    unflatten,
)
from spmdkit.communication.reducers.coded import error_like
from spmdkit.errors import ConfigError


def make(fraction: float = 0.01, most: float | None = 0.5) -> Reducer:
    """Returns the reducer.

    Args:
        fraction: fraction of the values that a replica sends in a step.
        most: limit for the bytes sent, as a fraction of those of `sum`; None: no limit.
    """
    rule = "It is a fraction of the values, at most 1. Write fraction: 0.01."
    check_option(is_number(fraction) and 0 < fraction <= 1, "topk.fraction", fraction, rule)
    rule = "It is a fraction of the bytes of sum, or null. Write most: 0.5."
    check_option(most is None or (is_number(most) and most > 0), "topk.most", most, rule)

    def reduced(leaves: Leaves, states: list[LeafState], over: ReduceGroup) -> tuple[Leaves, list[LeafState]]:
        errors = [state["error"] for state in states]
        k = _num_sent(sum(x.size for x in leaves), over.num, fraction, most)
        total, residuals = _send_largest(leaves, errors, over, k) if k else _send_all(leaves, errors, over)
        return total, [{"error": error} for error in residuals]

    def apply(leaves: Leaves, states: list[LeafState], over: ReduceGroup) -> tuple[Leaves, list[LeafState]]:
        return map_buffers(leaves, states, lambda group, group_states: reduced(group, group_states, over))

    def wire(values: int, num: int) -> float:
        k = _num_sent(values, num, fraction, most)
        return 8.0 * (num - 1) * k if k else 8 * (num - 1) / num * values

    def check(leaves: Sequence[ReducedLeaf]) -> None:
        together: Counter[tuple[tuple[str, ...], tuple[str, ...], int]] = Counter()
        for leaf in leaves:
            together[tuple(leaf.axes), leaf.sharded_over, leaf.num] += leaf.size
        sizes = [(values, num) for (_, _, num), values in together.items()]
        if most is not None and not any(_num_sent(values, num, fraction, most) for values, num in sizes):
            raise ConfigError(_refusal(fraction, most, *max(sizes)))

    return Reducer(
        exact=False,
        apply=apply,
        wire=wire,
        init=error_like,
        input_scale="weighted",
        check=check,
        exact_options={"fraction": 1.0, "most": None},
    )


def _num_sent(values: int, num: int, fraction: float, most: float | None) -> int:
    """Returns k, or zero if all values are reduced as by `sum`."""
    k = _whole_parts(values, fraction)
    return k if most is None or num * k < most * values else 0


def _whole_parts(values: int, fraction: float) -> int:
    return math.floor(fraction * (values + -values % PAD) / PAD + 1e-9) * PAD


def _refusal(fraction: float, most: float, values: int, num: int) -> str:
    if k := _whole_parts(values, fraction):
        reason = (
            f"{k:,} values from each replica are {num * k / values:.2f} of the bytes of sum; the limit is {most:g} "
            "(most)"
        )
    else:
        reason = f"that is fewer than {PAD:,} values, the smallest number that is sent"
    largest = math.floor(most * values / num / PAD) * PAD / (values + -values % PAD)
    candidates = (math.ceil(largest * 1000) / 1000, math.floor(largest * 1000) / 1000)
    fitting = next((x for x in candidates if _num_sent(values, num, x, most)), None)
    return (
        f"reducer: topk with fraction: {fraction:g} on {num} replicas, with a gradient of {values:,} values on a "
        f"device: {reason}. Try {'' if fitting is None else f'fraction: {fitting:g}, or '}reducer: int8."
    )


def _send_largest(
    leaves: Sequence[jax.Array], errors: Sequence[jax.Array], over: ReduceGroup, k: int
) -> tuple[Leaves, Leaves]:
    """Returns (sums of the k largest values of each replica, new residuals)."""
    compensated = flatten(leaves, PAD)
    compensated = (compensated + flatten(errors, PAD).astype(compensated.dtype)).astype(jnp.float32)
    _, indices = lax.top_k(jnp.where(jnp.isnan(compensated), jnp.inf, jnp.abs(compensated)), k)
    values = lax.bitcast_convert_type(compensated[indices], jnp.uint32)
    sent = gather_parts(jnp.concatenate([values, indices.astype(jnp.uint32)]), over.axes).reshape(over.num, 2, k)

    def add(total: jax.Array, of_replica: jax.Array) -> tuple[jax.Array, None]:
        values = lax.bitcast_convert_type(of_replica[0], jnp.float32)
        return total.at[of_replica[1].astype(jnp.int32)].add(values, unique_indices=True), None

    zeros = compat.as_varying(jnp.zeros(compensated.shape, compensated.dtype), tuple(compat.varying_axes(sent)))
    total, _ = lax.scan(add, zeros, sent)
    residuals = compensated.at[indices].set(0, unique_indices=True)
    return unflatten(total, leaves), unflatten(residuals, leaves, jnp.float32)


def _send_all(leaves: Sequence[jax.Array], errors: Sequence[jax.Array], over: ReduceGroup) -> tuple[Leaves, Leaves]:
    """Returns (sums including all residuals, zero residuals)."""
    compensated = [(x + error).astype(x.dtype) for x, error in zip(leaves, errors, strict=True)]
    return lax.psum(compensated, over.axes), [jnp.zeros_like(error) for error in errors]
