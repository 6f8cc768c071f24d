"""Rows picked and added by index, with a gradient that picks as well: no scatter in either direction.

    forward   out[b, m] = sum_k x[b, index[b, m, k]]         backward   dx[b, n] = sum_j dout[b, back[b, n, j]]

Tokens go to slots and slots back to tokens by two indices, each the inverse of the other, and both are known. A
gather's own gradient would be a scatter-add, which TPUs do row after row. Forward mode (`jax.jvp`) is one.

Shape suffixes: B examples, N rows there, M rows wanted, K and J rows added at most, D width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spmdkit import compat
from spmdkit.ops.both_modes import both_modes


def sum_rows(x_BND: jax.Array, index_BMK: jax.Array, back_BNJ: jax.Array) -> jax.Array:
    """Returns [B, M, D]: for each m the sum of rows `index[m]` of `x`, added in float32; an index of -1 adds nothing.

    `back` holds for each row the `m` to which it was added, -1 for none: pairs (m, n) are the same in both.
    """
    every = sorted(compat.varying_axes(x_BND) | compat.varying_axes(index_BMK) | compat.varying_axes(back_BNJ))
    x_BND, index_BMK, back_BNJ = (compat.as_varying(a, every) for a in (x_BND, index_BMK, back_BNJ))
    num_wanted = index_BMK.shape[1]

    def forward(x_BND: jax.Array, index_BMK: jax.Array, back_BNJ: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _take(x_BND, index_BMK), back_BNJ

    def tangent(back_BNJ: jax.Array, tangents: tuple[jax.Array, None, None]) -> jax.Array:
        return _add_to(tangents[0], back_BNJ, num_wanted)

    def backward(back_BNJ: jax.Array, cotangent_BMD: jax.Array) -> tuple[jax.Array, None, None]:
        return _take(cotangent_BMD, back_BNJ), None, None

    found: jax.Array = both_modes(forward, tangent, backward)(x_BND, index_BMK, back_BNJ)
    return found


def _add_to(x_BND: jax.Array, back_BNJ: jax.Array, num_wanted: int) -> jax.Array:
    """Returns [B, M, D] as `sum_rows` from `back` alone, by a scatter: what is kept for the gradient serves the forward
    mode too."""
    B, N, D = x_BND.shape
    rows = jnp.broadcast_to(x_BND[:, :, None].astype(jnp.float32), (B, N, back_BNJ.shape[2], D)).reshape(B, -1, D)
    place = jnp.where(back_BNJ < 0, num_wanted, back_BNJ).reshape(B, -1)
    add = lambda rows_RD, place_R: jnp.zeros_like(rows_RD, shape=(num_wanted, D)).at[place_R].add(rows_RD, mode="drop")
    return jax.vmap(add)(rows, place).astype(x_BND.dtype)


def _take(x_BND: jax.Array, index_BMK: jax.Array) -> jax.Array:
    pick = jax.vmap(lambda x_ND, index_M: x_ND.at[index_M].get(mode="promise_in_bounds"))

    def rows(index_BM: jax.Array) -> jax.Array:
        picked = pick(x_BND, jnp.maximum(index_BM, 0))
        return jnp.where(index_BM[..., None] >= 0, picked, jnp.zeros((), x_BND.dtype))

    if index_BMK.shape[-1] == 1:
        return rows(index_BMK[..., 0])
    total = sum(rows(index_BMK[..., k]).astype(jnp.float32) for k in range(index_BMK.shape[-1]))
    return jnp.asarray(total).astype(x_BND.dtype)
