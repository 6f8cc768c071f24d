"""The addition of an update to the parameters: the result rounded to nearest, or stochastically.

    p' = a  with probability (b - x) / (b - a),  otherwise b,     x = float32(p) + float32(u),  a <= x <= b

a and b are the neighbors of x in bfloat16, so that the mean of p' is x. Rounded to nearest, p' is p for every |u| below
half the distance of p to its neighbor: 1/512 to 1/256 of |p|.

The random bits are threefry's for the whole leaf. Each is a function of the step's key, the number of the leaf and the
position in it, so a result does not depend on the mesh or on a restart.

Wire: nothing.
Source: Gupta et al., "Deep learning with limited numerical precision" (2015), section 3; Zamirai et al., "Revisiting
BFloat16 training" (2020), which rounds updates of the weights so.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from spmdkit.step import rng
from spmdkit.step.trace_context import Context


def apply_updates(context: Context, params: Any, updates: Any, key: jax.Array) -> Any:
    """Returns `params + updates` in the dtypes of the parameters, rounded as the config requests.

    Args:
        key: key of the update, the same on every replica.
    """
    if not context.options.rounds_stochastically:
        return optax.apply_updates(params, updates)
    context.usage.record_call("rounding")
    leaves, structure = jax.tree.flatten(params)

    def added(number: int, p: jax.Array, u: jax.Array) -> jax.Array:
        if p.dtype != jnp.bfloat16:  # overwritten by its gradient, in a dtype of the task
            return (p + u).astype(p.dtype)
        return stochastic_bfloat16(p.astype(jnp.float32) + u.astype(jnp.float32), rng.rounding_key(key, number))

    pairs = enumerate(zip(leaves, jax.tree.leaves(updates), strict=True))
    return jax.tree.unflatten(structure, [added(number, p, u) for number, (p, u) in pairs])


def stochastic_bfloat16(x: jax.Array, key: jax.Array) -> jax.Array:
    """Returns float32 `x` as one of its two neighbors in bfloat16, with mean `x`. Values that bfloat16 represents, and
    those that are not finite, are unchanged."""
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)  # carries into the upper 16 bits, or does not
    upper = lax.shift_right_logical(lax.bitcast_convert_type(x, jnp.uint32) + noise, jnp.uint32(16))
    rounded = lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
