"""A function of one expert over sorted rows, block by block: a loop of as many turns as there are rows, and its
gradients of any order.

    for each expert e, for each block of its rows:      out[block] = fn(shared, weights[e], rows[block])

The number of turns is data, and JAX has no reverse mode through such a loop. But the gradient of a block is a function
like `fn`, of more rows (the cotangents with the rows) and with sums as further results: the loop over it is the
gradient of the loop over `fn`, and so on. There is no forward mode.

    fn(shared, own, rows) -> (rows, sum over an expert's blocks, sum over all blocks)

Rows that a block reads beyond its expert's are zero in it, and what it writes there the next expert overwrites.
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
    """Returns `fn(closed, weights of one expert, block of rows)` of all rows, [R, D].

    `closed`: what is the same for all experts, floats or not. `rows_RD`: `sizes[0]` rows of expert 0, and so on; after
    the last one's at least one block of rows more, which come out as anything.
    """
    of_floats = floats(closed)
    others = [x for i, x in enumerate(closed) if i not in of_floats]

    def run_block(fixed: Sequence[Any], shared: Sequence[jax.Array], own: Any, rows: tuple[jax.Array]) -> Any:
        rest, given = iter(fixed), dict(zip(of_floats, shared, strict=True))
        whole = [given[i] if i in given else next(rest) for i in range(len(closed))]
        return (fn(whole, own, rows[0]),), (), ()

    loop = _Loop(run_block, lambda shared, weights, rows: (rows, (), ()), block, 0)
    (out_RD,), _, _ = loop(others, [closed[i] for i in of_floats], weights, (rows_RD,), sizes_E)
    return out_RD


class _Loop(NamedTuple):
    """A function of blocks, over all of them.

    Attributes:
        fn: `(fixed, shared, own, rows) -> (rows, own, shared)`: the last two are parts of sums. `fixed` has no
            gradient.
        like: `(shared, weights, rows) -> (rows, weights, shared)`, arrays like the results.
        order: how many derivatives it is of the function at the start.
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
        """Returns the loop over the gradient of `fn`: every argument with the cotangent of the result that is like
        it."""

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

        def one_expert(carry: Any, given: Any) -> tuple[Any, Any]:
            own, start, size = given

            def one_block(i: jax.Array, carry: Any) -> Any:
                out, sums = carry
                of_block = jax.tree.map(lambda x: _block_of(x, start, size, i, block), rows)
                found, of_own, of_shared = self.fn(fixed, shared, own, of_block)
                if self.order > 1:  # a first derivative is zero there
                    found = jax.tree.map(lambda x: _kept(x, _is_own(size, i, block)), found)
                sums = jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, (of_shared, of_own))
                # Rows after the expert's own are written too, and again, rightly, by the experts that come after.
                write = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start + i * block, 0)
                return jax.tree.map(write, out, found), sums

            out, of_shared = carry
            of_own = self.like(shared, own, rows)[1]
            state = (out, (of_shared, jax.tree.map(_sum_of, of_own)))
            out, (of_shared, sums) = lax.fori_loop(0, -(-size // block), one_block, state)
            return (out, of_shared), jax.tree.map(lambda g, w: g.astype(w.dtype), sums, of_own)

        starts_E = jnp.cumsum(sizes_E) - sizes_E
        start = (jax.tree.map(_zeros, like_rows), jax.tree.map(_sum_of, like_shared))
        (out, of_shared), of_weights = lax.scan(one_expert, start, (weights, starts_E, sizes_E))
        # What lies after the last expert's rows is the last block's overhang: zero in a derivative.
        return out, of_weights, jax.tree.map(lambda g, x: g.astype(x.dtype), of_shared, like_shared)


def _sum_of(like: jax.Array) -> jax.Array:
    """Returns zeros to which parts of a sum like `like` are added, in float32 at least."""
    return _zeros(like, common_dtype(like.dtype, jnp.float32))


def _block_of(rows_RD: jax.Array, start: jax.Array, size: jax.Array, i: jax.Array, block: int) -> jax.Array:
    """Returns block `i` of one expert's rows, zero where they have ended."""
    is_own_N = _is_own(size, i, block)
    return _kept(lax.dynamic_slice_in_dim(rows_RD, start + i * block, block, 0), is_own_N)


def _is_own(size: jax.Array, i: jax.Array, block: int) -> jax.Array:
    return i * block + jnp.arange(block, dtype=jnp.int32) < size


def _kept(x_ND: jax.Array, is_own_N: jax.Array) -> jax.Array:
    return jnp.where(is_own_N[:, None], x_ND, jnp.zeros((), x_ND.dtype))


def _zeros(like: jax.Array, dtype: Any = None) -> jax.Array:
    """Returns zeros typed as varying like `like`, as the carry of a loop has to be from its start."""
    return compat.typed_like(jnp.zeros(like.shape, dtype or like.dtype), like)
