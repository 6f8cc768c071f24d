"""Tagging of sequences of different lengths: a mean over tokens, not over padding, and a short last batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import train_plain

# ---- shared ----------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
LENGTHS = random.integers(1, 7, 56)
DATA = {
    "x": random.normal(size=(56, 6, 8)).astype(np.float32),
    "tag": random.integers(0, 3, (56, 6)).astype(np.int32),
    "real": np.arange(6) < LENGTHS[:, None],
}


def init(key):
    k1, k2 = jax.random.split(key)
    return {"up": jax.random.normal(k1, (8, 16)) / 3, "down": jax.random.normal(k2, (16, 3)) / 4}


def losses_of(params, batch):
    logits = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tag"])


optimizer = optax.adamw(1e-2)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain():
    loss_of = lambda params, batch: jnp.mean(losses_of(params, batch), where=batch["real"])
    return train_plain(init, loss_of, optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch), where=batch["real"])


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])


# ---- checks ----------------------------------------------------------------------------------------------------------

SETTINGS = {"data": {"shuffle": False, "drop_remainder": False}}
