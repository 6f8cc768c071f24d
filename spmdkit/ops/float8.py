"""Matrix products in float8 with delayed scaling, for `precision: {matmul: float8}`.

    x_8 = e4m3(x / s_x)    w_8 = e4m3(w / s_w)    y  = s_x s_w  x_8 . w_8
    g_8 = e5m2(g / s_g)                           dx = s_g s_w  g_8 . w_8^T      dw = s_x s_g  x_8^T . g_8

A scale is the largest magnitude of the last `HISTORY` steps over the largest number of the format, 448 or 57,344. So it
is known before the operand is computed, and no pass over the operand precedes the product. Larger values are clipped.
A history is float32[3, HISTORY], the magnitudes of x, w and g, the newest first. It is a parameter leaf that its
gradient overwrites (step/leaf_roles.py), so the scales are part of a checkpoint. A non-finite magnitude is stored as 0.
A history of zeros, as that of x and g before the first step, has the scale 1. Saved for the backward pass are x_8 and
w_8.

Wire: in the backward pass a max all-reduce of 12 bytes per product over the axes of `sk.manual` along which an operand
varies, and in the step one of all histories over the replicas. So the scales are equal on every mesh.
When not: products with fewer than about 4,096 rows, columns or contracted values, for which the conversions cost more
than the product gains; chips without float8 products, which convert to bfloat16.
Source: Micikevicius et al., "FP8 formats for deep learning" (2022), sections 3 and 4; NVIDIA's TransformerEngine,
`DelayedScaling`; flax, `linen/fp8_ops.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit import compat
from spmdkit.step import trace_context

HISTORY = 16
"""Steps of a history."""
NAME = "float8"
"""Key of the histories in a dict of weights."""
PATTERN = rf"(.*/)?{NAME}/.*"
"""Paths of histories."""
FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


def float8_histories(weights: Mapping[str, jax.Array]) -> dict[str, dict[str, jax.Array]]:
    """Returns {"float8": {name: history}} for weights with products in float8, to be added to a dict of
    parameters in `init`; {} unless `precision.matmul` is float8. The history of the weight starts with its magnitude.

    Shapes: float32[3, HISTORY] each.
    """
    if not trace_context.current().options.float8:
        return {}
    empty = jnp.zeros((3, HISTORY))
    return {NAME: {name: empty.at[1, 0].set(_magnitude(w)) for name, w in weights.items()}}


def float8_product(x: jax.Array, w: jax.Array, history: jax.Array) -> jax.Array:
    """Returns x[M, K] . w[K, N] in the dtype of x. The gradient of the history is its new value."""
    return _product(compat.typed_like(x, w), compat.typed_like(w, x), history)


@jax.custom_vjp
def _product(x: jax.Array, w: jax.Array, history: jax.Array) -> jax.Array:
    return _forward(x, w, history)[0]


def _forward(x: jax.Array, w: jax.Array, history: jax.Array) -> tuple[jax.Array, Any]:
    x_8, x_scale = _quantized(x, history[0], FORWARD)
    w_8, w_scale = _quantized(w, history[1], FORWARD)
    y = _scaled(_dot(x_8, w_8, (1, 0), x.dtype), x_scale * w_scale)
    like = jnp.zeros((), x.dtype), jnp.zeros((), w.dtype)  # dtypes of the gradients
    # As integers: `jax.checkpoint` rounds what it saves of a float by `reduce_precision`, which makes NaN of an e4m3
    # above 240, since it reserves the largest exponent (jax 0.10.2).
    bits = [lax.bitcast_convert_type(values, jnp.uint8) for values in (x_8, w_8)]
    return y, (*bits, history, _magnitude(x), _magnitude(w), like)


def _backward(saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    *bits, history, x_max, w_max, (x_like, w_like) = saved
    x_8, w_8 = (lax.bitcast_convert_type(values, FORWARD) for values in bits)
    g_8, g_scale = _quantized(g, history[2], BACKWARD)
    x_scale, w_scale = _scale(history[0], FORWARD), _scale(history[1], FORWARD)
    dx = _scaled(_dot(g_8, w_8, (1, 1), x_like.dtype), g_scale * w_scale)
    dw = _scaled(_dot(x_8, g_8, (0, 0), w_like.dtype), g_scale * x_scale)
    newest = _whole(jnp.stack([x_max, w_max, _magnitude(g)]), history)
    return dx, dw, jnp.concatenate([newest[:, None], history[:, :-1]], axis=1)


_product.defvjp(_forward, _backward)


def _magnitude(x: jax.Array) -> jax.Array:
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    return jnp.where(jnp.isfinite(largest), largest, 0)


def _whole(largest: jax.Array, history: jax.Array) -> jax.Array:
    """Returns the maxima over the axes along which they vary and the history does not."""
    varying = compat.varying_axes(largest) - compat.varying_axes(history)
    return compat.typed_like(lax.pmax(largest, tuple(sorted(varying))) if varying else largest, history)


def _scale(history: jax.Array, dtype: Any) -> jax.Array:
    largest = jnp.max(history)
    return jnp.where(largest > 0, largest / float(jnp.finfo(dtype).max), 1)


def _quantized(x: jax.Array, history: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (x / scale in a float8, scale)."""
    scale, limit = _scale(history, dtype), float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) / scale, -limit, limit).astype(dtype), scale


def _dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int], dtype: Any) -> jax.Array:
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    y: jax.Array = lax.dot_general(a, b, dims, preferred_element_type=dtype)
    return y


def _scaled(y: jax.Array, scale: jax.Array) -> jax.Array:
    return (y.astype(jnp.float32) * scale).astype(y.dtype)
