"""The small classifier that many tasks train: data, model and loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

random = np.random.default_rng(0)
DATA = {"x": random.normal(size=(64, 12)).astype(np.float32), "y": random.integers(0, 4, 64).astype(np.int32)}


def init(key):
    k1, k2 = jax.random.split(key)
    return {"up": jax.random.normal(k1, (12, 16)) / 3, "down": jax.random.normal(k2, (16, 4)) / 4}


def logits_of(params, batch):
    return jnp.tanh(batch["x"] @ params["up"]) @ params["down"]


def losses_of(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch), batch["y"])
