"""One bit per value, a thirtieth of the bytes of `sum`: the sign, with the mean magnitude of its block. The error is
added to the next step's gradient.

    s_b = mean |c_b|,   q = sign(c_b)       of each block of 1,024 values                          1 bit, scale float32

The sign of zero is plus: a zero value in a nonzero block becomes `s_b` in this step, and error feedback corrects it in
the next step.

Use it on slow links, with `warmup: N`: gradients change fast in the first steps, and residuals are outdated when they
are applied. Do not use it with a small batch or an optimizer that divides by recent gradients (Adam with a small `b2`),
since the noise of one bit is as large as the gradient.
Exchange, memory and wire: `coded_reducer`, with 1 bit: 0.032 of `sum` for large gradients.
Source: Seide et al., "1-bit stochastic gradient descent" (2014), section 2; Karimireddy et al., "Error feedback fixes
SignSGD" (2019), algorithm 1, the scale; Tang et al., "1-bit Adam" (2021), section 4, warm-up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spmdkit.communication.reducers.base import Reducer
from spmdkit.communication.reducers.coded import block_code, coded_reducer


def make(block: int = 1024, error_feedback: bool = True) -> Reducer:
    """Returns the reducer.

    Args:
        block: number of values that share a scale. 1 sends each value exactly, for tests of exactness.
        error_feedback: False drops the rounding error. This uses no memory, and adds a bias that does not average out.
    """
    return coded_reducer(block_code("sign", block, _encode, _decode, bits=1), error_feedback, {"block": 1})


def _encode(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    is_plus = (x >= 0).reshape(*x.shape[:-2], -1)
    return jnp.packbits(is_plus, axis=-1), jnp.abs(x).mean(-1)


def _decode(payload: jax.Array, scales: jax.Array) -> jax.Array:
    is_plus = jnp.unpackbits(payload, axis=-1).reshape(*scales.shape[:-1], -1) > 0
    return jnp.where(is_plus, scales, -scales)
