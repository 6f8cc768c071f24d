"""Gather and sum of rows by index, with a gradient that is also a gather: no scatter in either direction.

    forward   out[b, m] = sum_k x[b, index[b, m, k]]         backward   dx[b, n] = sum_j dout[b, back[b, n, j]]

The index from tokens to slots and its inverse are both known. JAX's gradient of a gather would be a scatter-add, which
TPUs execute row by row. There is no forward mode.

Shape suffixes: B examples, N input rows, M output rows, K and J summands at most, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from spmdkit import compat


def sum_rows(x_BND: jax.Array, index_BMK: jax.Array, back_BNJ: jax.Array) -> jax.Array:
    """Returns [B, M, D]: for each m the sum of rows `index[m]` of `x`, in float32; an index of -1 adds nothing. `back`
    is the inverse: for each row the `m` to which it is added, -1 for none."""
    varying = sorted(compat.varying_axes(x_BND) | compat.varying_axes(index_BMK) | compat.varying_axes(back_BNJ))
    x_BND, index_BMK, back_BNJ = (compat.as_varying(a, varying) for a in (x_BND, index_BMK, back_BNJ))
    return _summed(x_BND, index_BMK, back_BNJ)


@jax.custom_vjp
def _summed(x_BND: jax.Array, index_BMK: jax.Array, back_BNJ: jax.Array) -> jax.Array:
    return _take(x_BND, index_BMK)


_summed.defvjp(
    lambda x_BND, index_BMK, back_BNJ: (_take(x_BND, index_BMK), back_BNJ),
    lambda back_BNJ, cotangent_BMD: (_take(cotangent_BMD, back_BNJ), None, None),
)


def _take(x_BND: jax.Array, index_BMK: jax.Array) -> jax.Array:
    pick: Callable[[jax.Array, jax.Array], jax.Array] = jax.vmap(
        lambda x_ND, index_M: x_ND.at[index_M].get(mode="promise_in_bounds")
    )

    def rows(index_BM: jax.Array) -> jax.Array:
        picked = pick(x_BND, jnp.maximum(index_BM, 0))
        return jnp.where(index_BM[..., None] >= 0, picked, jnp.zeros((), x_BND.dtype))

    if index_BMK.shape[-1] == 1:
        return rows(index_BMK[..., 0])
    total = sum(rows(index_BMK[..., k]).astype(jnp.float32) for k in range(index_BMK.shape[-1]))
    return jnp.asarray(total).astype(x_BND.dtype)
