"""Matrix products with sharded weights: a column-parallel product, a function, and a row-parallel product.

    column   x[B_b, T_st, D] . W[D_f, F_t]  ->  h[B_b, T_s, F_t]     all_gather x over t and W over f; no reduction
    row      h[B_b, T_s, F_t] . W[F_t, D_f]  ->  y[B_b, T_st, D]      all_gather W over f; reduce_scatter y over t

Axes: `b` batch, `s` sequence (context), `t` hidden dim (tensor), `f` weight storage (fsdp). Between the two products
the hidden dim is sharded, so any function that processes its channels (or heads) separately runs on shards. Between two
pairs the sequence is sharded over tensor too (`norm_sequence`), so that norms and residuals are not computed t times
(Korthikanti). With `sequence` there, y is reduced by an all_reduce (Shoeybi): the same bytes, t times the activations.

A weight dim that is sharded over a batch or sequence axis is stored sharded and gathered inside the op (ZeRO 3): once
in the forward pass and once in the backward pass. A reduce_scatter reduces its gradient.

Wire, bytes sent per device and call of a pair; N_t, N_f, N_c devices along t, f, and the other batch and sequence axes;
X and Y bytes of x and y with the sequence gathered over t, W bytes of all weights gathered over f, not t:

    forward    (N_t-1)/N_t (X + Y)     + (N_f-1)/N_f W
    backward   (N_t-1)/N_t (2 X + Y)   + 2 (N_f-1)/N_f W   + 2 (N_c-1)/N_c W/N_f

With `sequence`: 2 (N_t-1)/N_t Y forward, 2 (N_t-1)/N_t X backward.

When not: narrow hidden dims, for which the product of a shard takes less time than the transfer of x.
Source: Shoeybi et al., "Megatron-LM" (2019), section 3; Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (2022), section 4.2; Rajbhandari et al., "ZeRO" (2020), section 5.3.

Shape suffixes: B examples, T positions, D width, F hidden dims (one or more: [heads, width of a head]).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.ops.collectives import Names, all_gather, all_reduce, axes, reduce_scatter
from spmdkit.ops.float8 import float8_product
from spmdkit.ops.manual import Dims, manual
from spmdkit.step import trace_context

ROWS: Dims = ("batch", "norm_sequence", None)
"""Dims of x and y between two pairs."""
GPUS = ("gpu", "cuda", "rocm")
MOST_PARTS = 4
PART_TOKENS = 8192
"""Limits of `in_row_parts`, as measured there."""


@jax.named_scope(trace_context.TENSOR)
def column_row_parallel(
    x_BTD: jax.Array,
    columns: Sequence[jax.Array],
    between: Callable[..., jax.Array],
    row: jax.Array,
    *,
    hidden: str = "mlp",
    dims: Dims = ROWS,
    column_dims: Sequence[Dims] | None = None,
    row_dims: Dims | None = None,
    extra: Sequence[Any] = (),
    extra_dims: Sequence[Any] = (),
) -> jax.Array:
    """Returns `between(x . columns[0], x . columns[1], ..., *extra) . row`, like `x`.

        y_BTD = sk.column_row_parallel(x_BTD, [gate_DF, up_DF], lambda gate, up: jax.nn.silu(gate) * up, down_FD)
        y_BTD = sk.column_row_parallel(x_BTD, [q_DNH, k_DNH, v_DNH], attention, out_NHD, hidden="heads")

    Args:
        x_BTD: any number of leading dims.
        columns: weights [D, *F]; F may differ between them.
        between: function of shards: the full sequence of the context shard, and a shard of the hidden dims. It must not
            close over traced arrays (pass them as `extra`) and must not mix values along the sharded hidden dim.
        row: weight [*F, D]; F as `between` returns it.
        hidden: logical name of the sharded hidden dim, the first of F.
        dims: dims of x and of the result.
        column_dims: dims of each weight; default `("embed", hidden)`.
        row_dims: dims of `row`; default `(hidden, None, ..., "embed")`.
        extra: further arguments of `between`, with `extra_dims` for each, as in `sk.manual`.

    Layout: x and result as `dims`; weights as their dims. Works in the global view, and inside `sk.manual` on shards.

    Raises:
        ConfigError: a dim is not divisible by its axes, or shapes do not match.
    """
    in_column = list(column_dims) if column_dims is not None else [("embed", hidden) for _ in columns]
    if len(in_column) != len(columns) or len(extra) != len(extra_dims):
        raise ConfigError(
            f"sk.column_row_parallel: {len(columns)} columns with {len(in_column)} column_dims, {len(extra)} extra "
            f"with {len(extra_dims)} extra_dims. Each array needs its dims. Pass one tuple of names for each."
        )
    in_row = row_dims or (hidden, *(None,) * (row.ndim - 2), "embed")

    def pair(x: jax.Array, columns: Sequence[jax.Array], row: jax.Array, extra: Sequence[Any]) -> jax.Array:
        hidden_axes = kept_axes(in_row[:-1], dims)
        x = gather_rows(x, dims, hidden_axes)
        products = [product(x, gather_weight(w, d, dims, 0, x)) for w, d in zip(columns, in_column, strict=True)]
        h, contracted = between(*products, *extra), row.ndim - 1
        row_w = gather_weight(row, in_row, dims, contracted, h)
        if h.shape[len(dims) - 1 :] != row_w.shape[:-1]:
            raise ConfigError(
                f"the function between the products returned a shard {h.shape}, and the row weight's shard is "
                f"{row_w.shape}. The dims of the result after the first {len(dims) - 1} are those of the weight before "
                "its last. Check both shapes and the names of their dims."
            )
        return reduce_rows(product(h, row_w, contracted), dims, hidden_axes)

    in_dims = (dims, in_column, in_row, list(extra_dims))
    y_BTD: jax.Array = manual(pair, in_dims, dims, "sk.column_row_parallel")(x_BTD, list(columns), row, list(extra))
    return y_BTD


# ---- on shards


def in_row_parts(layer: Callable[..., Any], rows: Any, tokens: int) -> Any:
    """Returns `layer(rows)`, trees of [B, ...]. On TPUs and GPUs with a tensor axis, it is computed in up to
    `MOST_PARTS` parts of B: the collectives of one part run while others compute. Bytes on the wire do not change.

    A 7B GPT on data 2 x tensor 4, batch 16 x 4,096, predicted by `plan` (2026-11-27). Eight v5p: a step of 1,665 ms in
    one part, 328 ms of it exposed; 1,514 and 181 ms in two; 1,493 and 134 ms in four. Eight H100, four layers: 159.6 ms
    in one part, 18.6 ms of it exposed over tensor; 147.4 and 3.8 ms in four.

    Args:
        layer: treats each row separately. Gradients of what it closes over are added up over the parts, in their dtype.
        tokens: of a row, over all shards of the tensor axis. A part has at least `PART_TOKENS`.

    Source: Wang et al., "Domino: Eliminating Communication in LLM Training" (2024).
    """
    num = len(jax.tree.leaves(rows)[0])
    fits: Callable[[int], bool] = lambda parts: num % parts == 0 and num // parts * tokens >= PART_TOKENS
    context = trace_context.current()
    # The gradients of float8 histories are maxima, and the parts would add them up.
    overlaps = _has_tensor() and context.platform != "cpu" and not context.options.float8
    parts = next((n for n in range(MOST_PARTS, 1, -1) if fits(n)), 1) if overlaps else 1
    if parts == 1:
        return layer(rows)
    part: Callable[[int], Any] = lambda i: jax.tree.map(lambda x: x[i * num // parts : (i + 1) * num // parts], rows)
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *(layer(part(i)) for i in range(parts)))


def product(x: jax.Array, w: jax.Array, contracted: int = 1, history: jax.Array | None = None) -> jax.Array:
    """Returns the product over the last `contracted` dims of `x` and the first of `w`, as one 2-D x 2-D product: on
    XLA's CPU backend 1.5 times as fast as 3-D x 2-D (2 cores, 2026-11-20), on GPUs equally fast.

    On TPUs the dims stay: the compiler then writes heads in the order of the attention kernel, and has no copies. A 7B
    GPT on eight v5p, predicted by `plan`: fsdp 8: 1,348 instead of 1,400 ms; data 2 x pipeline 4: 2,007 instead of
    2,094 ms (2026-11-27).

    On GPUs the rows are ordered [T, B] if positions are sharded over tensor: XLA's collectives have the gathered dim
    first in memory, and the order [B, T] costs a copy at each of them.

    On CPU a float32 weight with more rows than columns is transposed behind a barrier, so that its gradient is computed
    transposed: x[4096, 512]^T y[4096, 128] takes 9.8 ms, its transpose 5.3 ms (one core, jaxlib 0.10.2, 2026-11-25).

    With the `history` of `sk.float8_histories` the product is computed in float8."""
    platform = trace_context.current().platform
    if platform == "tpu" and history is None:
        return jnp.tensordot(x, w, contracted)
    x_dims, w_dims = x.shape[: x.ndim - contracted], w.shape[contracted:]
    if len(x_dims) == 2 and _has_tensor() and platform in GPUS:
        return _rows_product(x.swapaxes(0, 1), w, x_dims[::-1], w_dims, history).swapaxes(0, 1)
    return _rows_product(x, w, x_dims, w_dims, history)


def _has_tensor() -> bool:
    return trace_context.current().sharding.size("tensor") > 1


def _rows_product(
    x: jax.Array, w: jax.Array, x_dims: tuple[int, ...], w_dims: tuple[int, ...], history: jax.Array | None
) -> jax.Array:
    x, w = x.reshape(math.prod(x_dims), -1), w.reshape(-1, math.prod(w_dims))
    if history is not None:
        return float8_product(x, w, history).reshape(*x_dims, *w_dims)
    is_tall = len(x) >= w.shape[0] > w.shape[1]
    if is_tall and w.dtype == jnp.float32 and trace_context.current().platform == "cpu":
        w = lax.optimization_barrier(w.T).T
    y = x @ w
    return y.reshape(*x_dims, *w_dims)


def gather_weight(w: jax.Array, w_dims: Dims, dims: Dims, width_dim: int, x: jax.Array) -> jax.Array:
    """Returns a weight gathered over its storage axes: all axes of the width dim, and the row axes of other dims.

    It is typed as varying like `x` *before* the gather, so that its gradient is scattered first. A last dim is gathered
    as the first dim, with a barrier: the TPU compiler (libtpu 0.0.42) has no reduce_scatter along the last dim on
    v5e."""
    w = compat.typed_like(w, x)
    for dim, name in enumerate(w_dims):
        if name is not None:
            cut = axes(name)
            stored = cut if dim == width_dim else tuple(a for a in cut if a in _rows_axes(dims))
            if stored and cut[-len(stored) :] != stored:
                raise ConfigError(
                    f"layout.axes.{name} is {list(cut)}: {list(stored)} also cuts the examples, so it only stores the "
                    f"weight. Such axes come last. Write {name}: "
                    f"[{', '.join([a for a in cut if a not in stored] + list(stored))}]."
                )
            if stored and dim == w.ndim - 1 > 0:
                w = jnp.moveaxis(lax.optimization_barrier(whole_weight(jnp.moveaxis(w, -1, 0), stored, 0)), 0, -1)
            elif stored:
                w = whole_weight(w, stored, dim)
    return w


def whole_weight(w: jax.Array, stored: Names, dim: int) -> jax.Array:
    """Returns a weight gathered on `dim`. Its gradient is scattered in `precision.reduction`."""
    dtype = trace_context.current().options.reduction_dtype or w.dtype
    if dtype == w.dtype:
        return all_gather(w, stored, dim)

    @jax.custom_jvp
    def gathered(w: jax.Array) -> jax.Array:
        return all_gather(w, stored, dim)

    @gathered.defjvp
    def tangent(primals: Any, tangents: Any) -> Any:  # its transpose is the scatter
        return gathered(primals[0]), all_gather(tangents[0].astype(dtype), stored, dim).astype(w.dtype)

    whole: jax.Array = gathered(w)
    return whole


def scatter_gradient(grad: jax.Array, like: jax.Array, w_dims: Dims, dims: Dims, width_dim: int) -> jax.Array:
    """Returns the gradient of a weight's shard `like` from the gradient of the gathered weight: the transpose of
    `gather_weight`, for custom gradients."""
    grad = grad.astype(trace_context.current().options.reduction_dtype or grad.dtype)
    for dim, name in enumerate(w_dims):
        cut = axes(name) if name is not None else ()
        stored = cut if dim == width_dim else tuple(a for a in cut if a in _rows_axes(dims))
        grad = reduce_scatter(grad, stored, dim) if stored else grad
    return summed_like(grad, like).astype(like.dtype)


def summed_like(grad: jax.Array, primal: jax.Array) -> jax.Array:
    """Returns a gradient summed over the axes along which it varies and its primal does not."""
    differs = tuple(a for a in compat.varying_axes(grad) if a not in compat.varying_axes(primal))
    return lax.psum(grad, differs) if differs else grad


def gather_rows(x: jax.Array, dims: Dims, hidden_axes: Sequence[str]) -> jax.Array:
    """Returns x with the sequence gathered over the axes that shard the hidden dim of the product."""
    for dim, name in enumerate(dims):
        if shared := _shared(name, hidden_axes):
            x = all_gather(x, shared, dim)
    return x


def reduce_rows(y: jax.Array, dims: Dims, hidden_axes: Sequence[str]) -> jax.Array:
    """Returns the sum over the axes of the hidden dim, scattered over the sequence where `norm_sequence` shards it."""
    remaining = list(hidden_axes)
    for dim, name in enumerate(dims):
        if shared := _shared(name, hidden_axes):
            y = reduce_scatter(y, shared, dim)
            remaining = [a for a in remaining if a not in shared]
    return all_reduce(y, remaining) if remaining else y


# ---- axes


def _shared(name: str | None, hidden_axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes of `norm_sequence` that are not axes of `sequence`, if the hidden dim is sharded over them."""
    if name != "norm_sequence":
        return ()
    cut = axes(name)
    finer = tuple(a for a in cut if a not in axes("sequence"))
    shared = tuple(a for a in finer if a in hidden_axes)
    if shared and (shared != finer or cut[-len(finer) :] != finer):
        raise ConfigError(
            f"layout.axes.norm_sequence is {list(cut)}, sequence {list(axes('sequence'))} and the hidden dim "
            f"{list(hidden_axes)}. norm_sequence is the axes of sequence, then axes of the hidden dim alone. Try "
            f"norm_sequence: [{', '.join((*axes('sequence'), *shared))}]."
        )
    return shared


def between_dims(dims: Dims, hidden_axes: Sequence[str]) -> Dims:
    """Returns the leading dims between the two products."""
    return tuple("sequence" if _shared(name, hidden_axes) else name for name in dims[:-1])


def _rows_axes(dims: Dims) -> tuple[str, ...]:
    names = ("sequence" if name == "norm_sequence" else name for name in dims[:-1])
    return axes(*(name for name in names if name is not None))


def kept_axes(names: Sequence[str | None], dims: Dims) -> tuple[str, ...]:
    """Returns the axes over which the hidden dims remain sharded: the axes that do not shard the rows."""
    return tuple(a for a in axes(*(n for n in names if n is not None)) if a not in _rows_axes(dims))
