"""A function of one expert over sorted rows, block by block, in a loop with a dynamic number of iterations, and its
gradients of any order.

    for each expert e, for each block of its rows:      out[block] = fn(shared, weights[e], rows[block])

The number of iterations depends on data, and JAX has no reverse mode for such a loop. The gradient of a block is a
function like `fn`, with more rows (rows and cotangents) and with sums as further results. The loop over it is the
gradient of the loop over `fn`, and so on for higher orders. There is no forward mode.

    fn(shared, own, rows) -> (rows, sum over an expert's blocks, sum over all blocks)

A block reads zeros beyond the rows of its expert, and the next expert overwrites the results there.
Shape suffixes: E experts, N rows of a block, R rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit import compat
from spmdkit.foundation.trees import common_dtype
from spmdkit.ops.residuals import floats


def by_blocks(
    fn: Callable[..., jax.Array],
    block: int,
    closed: Sequence[Any],
    weights: Any,
    rows_RD: jax.Array,
    sizes_E: jax.Array,
) -> jax.Array:
    """Returns `fn(closed, weights of one expert, block of rows)` for all rows, [R, D].

    `closed`: arrays shared by all experts, of any dtype. `rows_RD`: `sizes[0]` rows of expert 0, and so on, then at
    least one block of padding rows, with undefined results.
    """
    of_floats = floats(closed)
    non_floats = [x for i, x in enumerate(closed) if i not in of_floats]

    def run_block(fixed: Sequence[Any], shared: Sequence[jax.Array], own: Any, rows: tuple[jax.Array]) -> Any:
        rest, float_values = iter(fixed), dict(zip(of_floats, shared, strict=True))
        all_closed = [float_values[i] if i in float_values else next(rest) for i in range(len(closed))]
        return (fn(all_closed, own, rows[0]),), (), ()

    loop = _Loop(run_block, lambda shared, weights, rows: (rows, (), ()), block, 0)
    out_RD: jax.Array
    (out_RD,), _, _ = loop(non_floats, [closed[i] for i in of_floats], weights, (rows_RD,), sizes_E)
    return out_RD


class _Loop(NamedTuple):
    """A loop of a function over all blocks.

    Attributes:
        fn: `(fixed, shared, own, rows) -> (rows, own, shared)`: the last two are partial sums. `fixed` has no gradient.
        like: `(shared, weights, rows) -> (rows, weights, shared)`, arrays with the types of the results.
        order: the order of the derivative of the original function.
    """

    fn: Callable[..., Any]
    like: Callable[..., Any]
    block: int
    order: int

    def __call__(self, fixed: Any, shared: Any, weights: Any, rows: Any, sizes_E: jax.Array) -> Any:
        """Returns (rows, sums for each expert, sums over all)."""

        def forward(*args: Any) -> tuple[Any, Any]:
            return run(*args), args

        def backward(kept: Any, cotangents: Any) -> Any:
            fixed, shared, weights, rows, sizes_E = kept
            of_rows, of_weights, of_shared = cotangents
            pulled = self._pulled()(fixed, (shared, of_shared), (weights, of_weights), (rows, of_rows), sizes_E)
            by_rows, by_weights, by_shared = pulled
            return [None] * len(fixed), by_shared, by_weights, by_rows, None

        run = jax.custom_vjp(self._run)
        run.defvjp(forward, backward)
        return run(fixed, shared, weights, rows, sizes_E)

    def _pulled(self) -> _Loop:
        """Returns the loop over the gradient of `fn`: each argument is paired with the cotangent of the result of the
        same type."""

        def fn(fixed: Any, shared: Any, own: Any, rows: Any) -> Any:
            of = lambda shared, own, rows: self.fn(fixed, shared, own, rows)
            _, vjp = jax.vjp(of, shared[0], own[0], rows[0])
            by_shared, by_own, by_rows = vjp((rows[1], own[1], shared[1]))
            return by_rows, by_own, by_shared

        like = lambda shared, weights, rows: (rows[0], weights[0], shared[0])
        return _Loop(fn, like, self.block, self.order + 1)

    def _run(self, fixed: Any, shared: Any, weights: Any, rows: Any, sizes_E: jax.Array) -> Any:
        block = self.block
        like_rows, _, like_shared = self.like(shared, weights, rows)

        def one_expert(carry: Any, inputs: Any) -> tuple[Any, Any]:
            own, start, size = inputs

            def one_block(i: jax.Array, carry: Any) -> Any:
                out, sums = carry
                of_block = jax.tree.map(lambda x: _block_of(x, start, size, i, block), rows)
                out_rows, of_own, of_shared = self.fn(fixed, shared, own, of_block)
                if self.order > 1:  # a first derivative is zero in these rows
                    out_rows = jax.tree.map(lambda x: _kept(x, _is_own(size, i, block)), out_rows)
                sums = jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, (of_shared, of_own))
                # Rows after those of the expert are written too; later experts overwrite them with correct values.
                write = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start + i * block, 0)
                return jax.tree.map(write, out, out_rows), sums

            out, of_shared = carry
            of_own = self.like(shared, own, rows)[1]
            state = (out, (of_shared, jax.tree.map(_sum_of, of_own)))
            out, (of_shared, sums) = lax.fori_loop(0, -(-size // block), one_block, state)
            return (out, of_shared), jax.tree.map(lambda g, w: g.astype(w.dtype), sums, of_own)

        starts_E = jnp.cumsum(sizes_E) - sizes_E
        start = (jax.tree.map(_zeros, like_rows), jax.tree.map(_sum_of, like_shared))
        (out, of_shared), of_weights = lax.scan(one_expert, start, (weights, starts_E, sizes_E))
        # Rows after those of the last expert are the rest of the last block: zero in a derivative.
        return out, of_weights, jax.tree.map(lambda g, x: g.astype(x.dtype), of_shared, like_shared)


def _sum_of(like: jax.Array) -> jax.Array:
    """Returns zeros as the start of a sum of arrays like `like`, in at least float32."""
    return _zeros(like, common_dtype(like.dtype, jnp.float32))


def _block_of(rows_RD: jax.Array, start: jax.Array, size: jax.Array, i: jax.Array, block: int) -> jax.Array:
    """Returns block `i` of one expert's rows, padded with zeros."""
    is_own_N = _is_own(size, i, block)
    return _kept(lax.dynamic_slice_in_dim(rows_RD, start + i * block, block, 0), is_own_N)


def _is_own(size: jax.Array, i: jax.Array, block: int) -> jax.Array:
    return i * block + jnp.arange(block, dtype=jnp.int32) < size


def _kept(x_ND: jax.Array, is_own_N: jax.Array) -> jax.Array:
    return jnp.where(is_own_N[:, None], x_ND, jnp.zeros((), x_ND.dtype))


def _zeros(like: jax.Array, dtype: Any = None) -> jax.Array:
    """Returns zeros typed as varying like `like`: the initial carry of a loop needs its final type."""
    return compat.typed_like(jnp.zeros(like.shape, dtype or like.dtype), like)
