"""Low-rank compression of gradient matrices to two thin factors, by one power iteration, with error feedback.

    C_r[m n] = G_r / C + E_r        this replica's part of the mean, and its residual
    P[m r] = orth(sum_r C_r Q)      all_reduce of m r values; Q[n r] spans the product of the last step
    R[n r] = sum_r C_r^T P          all_reduce of n r values
    G = P R^T,   E_r = C_r - P (C_r^T P)^T

A leaf is one matrix: its dims are split so that m + n is minimal. The first dim of a leaf of stacked layers (`stacked`)
is a batch of matrices. A leaf with one dim, or with fewer values than its factors, is reduced exactly in the first
all_reduce. A leaf sharded over model axes is compressed per shard.

Warm start: the subspace of Q is that of the previous step's product `P R^T`. The state stores the product in the leaf's
shape, so that a run can resume on any mesh. Without warm start each step draws a random Q, equal on all replicas.

Use it if matrices are large and links slow: the bytes grow with m + n instead of m n, and those of an all_reduce do not
grow with the number of replicas. Do not use it for small models, or while gradients have no low-rank structure (for
early steps set `warmup: N`). Adam needs a higher rank than momentum SGD (docs/benchmarks.md: 400 steps of a small GPT,
rank 16 for 1 %).
Memory: 8 bytes per value on each replica (4 without warm start), in the train state. Arithmetic: 8 r products and sums
per value (6 without).
Wire: two all_reduces over the replica axes, `2 (N-1)/N * 4 * (sum over matrices of r (m + n) + the values of all other
leaves)` bytes per device and step.
Source: Vogels, Karimireddy, Jaggi, "PowerSGD" (2019), algorithms 1 and 2, section 4.2 (warm start). Its compression of
ResNet-18, 243 / 136 / 72 at rank 1 / 2 / 4 (table 3, appendix F), is that of the formula above.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit import compat
from spmdkit.communication.options import check_option, check_patterns, is_number, is_whole
from spmdkit.communication.reducers.base import (
    LeafShapes,
    LeafState,
    Leaves,
    ReducedLeaf,
    ReduceGroup,
    Reducer,
    buffer_groups,
    flatten,
    split_evenly,
    unflatten,
)
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import common_dtype

STACKED = (r"(.*/)?(blocks|layers|experts)/(?!\d+/).*",)
"""Leaves below one of these names that is not followed by a number: `blocks/query`, not `blocks/0/query`."""


def make(rank: int = 4, warm_start: bool = True, stacked: Sequence[str] = STACKED, least: float = 1.0) -> Reducer:
    """Returns the reducer.

    Args:
        rank: number of columns of the factors, limited by the size of the matrix.
        warm_start: False draws Q in each step, which halves the memory.
        stacked: patterns for complete paths of leaves with a first dim that is a batch of matrices.
        least: minimum ratio of a leaf's values to those of its factors for compression. Leaves below it are reduced
            exactly. 0 compresses every matrix, for tests of exactness.
    """
    _check_options(rank, stacked, least)

    def view(path: str, shape: Sequence[int]) -> tuple[int, int, int] | None:
        """Returns (number of matrices, m, n) of a compressed leaf, or None."""
        return matrices(shape, rank, any(re.fullmatch(p, path) for p in stacked), least)

    def init(leaf: jax.ShapeDtypeStruct) -> LeafShapes:
        if not any(matrices(leaf.shape, rank, is_stacked, least) for is_stacked in (False, True)):
            return {}
        like = jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
        return {"error": like} | ({"product": like} if warm_start else {})

    def apply(leaves: Leaves, states: list[LeafState], over: ReduceGroup) -> tuple[Leaves, list[LeafState]]:
        out, new = list(leaves), list(states)
        for group in buffer_groups(leaves):
            views = {i: v for i in group if (v := view(over.paths[i] if over.paths else "", leaves[i].shape))}
            for i, leaf, state in _reduce_group(leaves, states, group, views, over, rank):
                out[i], new[i] = leaf, state
        return out, new

    def wire_of(added: Sequence[ReducedLeaf]) -> float:
        sent = 0.0
        for leaf in added:
            factored = view(leaf.path, leaf.shape)
            factors = factored[0] * min(rank, *factored[1:]) * (factored[1] + factored[2]) if factored else 0
            sent += 8 * (leaf.num - 1) / leaf.num * factors if factored else leaf.allreduce_bytes
        return sent

    def check(added: Sequence[ReducedLeaf]) -> None:
        if not any(view(leaf.path, leaf.shape) for leaf in added):
            raise ConfigError(_refusal(max(added, key=lambda leaf: leaf.size), rank))

    return Reducer(
        exact=False,
        apply=apply,
        wire=lambda values, num: 8 * (num - 1) / num * values,
        wire_of=wire_of,
        init=init,
        reshard_state=_reshard_state,
        input_scale="weighted",
        check=check,
        exact_options={"rank": 1 << 20, "least": 0},
    )


def _refusal(largest: ReducedLeaf, rank: int) -> str:
    return (
        f"reducer: powersgd with rank: {rank}: no leaf of the gradient is a matrix with more values than its factors; "
        f"the largest is {largest.path!r}, {list(largest.shape)} on a device. Write a smaller rank, or reducer: int8."
    )


def _check_options(rank: int, stacked: Sequence[str], least: float) -> None:
    rule = "It is a number of columns, at least 1. Write rank: 4."
    check_option(is_whole(rank, 1), "powersgd.rank", rank, rule)
    rule = "It is a number of at least 0. Write least: 1."
    check_option(is_number(least) and least >= 0, "powersgd.least", least, rule)
    is_list = isinstance(stacked, Sequence) and not isinstance(stacked, str)
    check_option(is_list, "powersgd.stacked", stacked, "It is a list of patterns. Write stacked: ['blocks/.*'].")
    check_patterns("powersgd.stacked", stacked)


def matrices(shape: Sequence[int], rank: int, is_stacked: bool, least: float) -> tuple[int, int, int] | None:
    """Returns (number of matrices, rows, columns) of a leaf, or None if it is reduced exactly."""
    lead = 1 if is_stacked and len(shape) > 2 else 0
    of_one = shape[lead:]
    if len(of_one) < 2 or not math.prod(shape):
        return None
    parted = [(math.prod(of_one[:i]), math.prod(of_one[i:])) for i in range(1, len(of_one))]
    m, n = min(parted, key=sum)
    return (math.prod(shape[:lead]), m, n) if least * min(rank, m, n) * (m + n) <= m * n else None


def _reshard_state(state: LeafState, num: int) -> dict[str, jax.Array]:
    """Returns the state for another number of replicas: residuals are split evenly, the product is replicated."""
    product = {name: jnp.broadcast_to(x[0], (num, *x.shape[1:])) for name, x in state.items() if name == "product"}
    return split_evenly({name: x for name, x in state.items() if name != "product"}, num) | product


def _reduce_group(
    leaves: Leaves,
    states: list[LeafState],
    group: Sequence[int],
    views: dict[int, tuple[int, int, int]],
    over: ReduceGroup,
    rank: int,
) -> list[tuple[int, jax.Array, LeafState]]:
    """Returns (index, sum, state) of the leaves of one buffer."""
    compensated = {i: _add_error(leaves[i], states[i]) for i in group}
    inputs = {i: compensated[i].astype(jnp.float32).reshape(v) for i, v in views.items()}
    exact = [i for i in group if i not in views]
    starts = [_initial_q(states[i].get("product"), v, min(rank, *v[1:]), i, over) for i, v in views.items()]
    left = [_product("bmn,bnr->bmr", x, q) for x, q in zip(inputs.values(), starts, strict=True)]
    summed = _sum([*left, *(compensated[i] for i in exact)], over)
    bases = [orthonormal(p, i) for i, p in enumerate(summed[: len(left)])]
    right = [_product("bmn,bmr->bnr", x, p) for x, p in zip(inputs.values(), bases, strict=True)]
    results: list[tuple[int, jax.Array, LeafState]] = []
    for i, x, p, local, r in zip(inputs, inputs.values(), bases, right, _sum(right, over), strict=True):
        shape, total = leaves[i].shape, _product("bmr,bnr->bmn", p, r)
        state = {"error": (x - _product("bmr,bnr->bmn", p, local)).reshape(shape)}
        if "product" in states[i]:
            state["product"] = total.reshape(shape)
        results.append((i, total.reshape(shape).astype(leaves[i].dtype), state))
    for i, total in zip(exact, summed[len(left) :], strict=True):
        new_state = {name: jnp.zeros_like(x) if name == "error" else x for name, x in states[i].items()}
        results.append((i, total.astype(leaves[i].dtype), new_state))
    return results


def _add_error(leaf: jax.Array, state: LeafState) -> jax.Array:
    if "error" not in state:
        return leaf
    dtype = common_dtype(leaf.dtype, state["error"].dtype)
    return leaf.astype(dtype) + state["error"].astype(dtype)


def _sum(leaves: Sequence[jax.Array], over: ReduceGroup) -> Leaves:
    return unflatten(lax.psum(flatten(leaves, 1), over.axes), leaves) if leaves else []


def _initial_q(
    product: jax.Array | None, view: tuple[int, int, int], rank: int, index: int, over: ReduceGroup
) -> jax.Array:
    """Returns Q, float32[matrices, n, rank], orthonormal and equal on all replicas: the subspace of the previous step's
    product, or a random subspace.

    If the rank of the product is below `rank` (a batch of two rows), random directions replace the missing columns.
    """
    num, m, n = view
    key = over.key() if product is None else jax.random.key(0, impl="threefry2x32")
    key = jax.random.fold_in(key, index)
    drawn = jax.random.normal(key, (num, n, rank), jnp.float32)
    if product is None:
        return orthonormal(drawn, index)
    mixed = jax.random.normal(jax.random.fold_in(key, 1), (num, m, rank), jnp.float32)
    spanned = _product("bmn,bmr->bnr", product.reshape(view), mixed)
    return orthonormal(jnp.where(jnp.any(product != 0), spanned, drawn), index)


def orthonormal(x: jax.Array, index: int) -> jax.Array:
    """Returns [..., n, rank], orthonormal columns that span the columns of `x`. A column that depends linearly on the
    previous ones is replaced by a random column.

    It is Gram-Schmidt, applied twice per column ("twice is enough": Giraud et al., 2005), without LAPACK: its QR,
    called by eight devices of one process concurrently, took 12 s of CPU time for 40 matrices of 128 x 128 (jaxlib
    0.10.2, two cores, 2026-11-23).
    """
    spare = jax.random.normal(jax.random.fold_in(jax.random.key(1, impl="threefry2x32"), index), x.shape, jnp.float32)

    def project_out(done: jax.Array, column: jax.Array) -> jax.Array:
        for _ in range(2):
            column = column - _product("bnr,br->bn", done, _product("bnr,bn->br", done, column))
        return column

    def orthonormalize_column(i: jax.Array, done: jax.Array) -> jax.Array:
        column = lax.dynamic_index_in_dim(x, i, 2, keepdims=False)
        residual, size = project_out(done, column), jnp.linalg.norm(column, axis=1, keepdims=True)
        replacement = project_out(done, lax.dynamic_index_in_dim(spare, i, 2, keepdims=False))
        is_dependent = jnp.linalg.norm(residual, axis=1, keepdims=True) <= 1e-5 * size
        column = jnp.where(is_dependent, replacement, residual)
        column = column / jnp.linalg.norm(column, axis=1, keepdims=True)
        result: jax.Array = lax.dynamic_update_index_in_dim(done, column, i, 2)
        return result

    zeros = compat.as_varying(jnp.zeros(x.shape, x.dtype), tuple(compat.varying_axes(x)))
    result: jax.Array = lax.fori_loop(0, x.shape[2], orthonormalize_column, zeros)
    return result


def _product(dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a product in full float32 precision. At a TPU's default precision the residual would not equal the
    compression error."""
    return jnp.einsum(dims, a, b, precision=lax.Precision.HIGHEST)
