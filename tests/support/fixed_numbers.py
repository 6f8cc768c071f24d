"""Parameters for an `init` of tests: compiling random numbers takes longer than compiling a small step."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int) -> jax.Array:
    """Returns normally distributed numbers, float32: a constant of the program that calls it."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))
