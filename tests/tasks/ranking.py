"""Ranking: each row is a query with its documents, some of them missing, and a softmax over those that are there."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import train_plain

# ---- shared ----------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {
    "docs": random.normal(size=(56, 5, 8)).astype(np.float32),
    "clicks": random.integers(0, 2, (56, 5)).astype(np.float32),
    "there": np.arange(5) < random.integers(2, 6, 56)[:, None],
}


def init(key):
    k1, k2 = jax.random.split(key)
    return {"up": jax.random.normal(k1, (8, 16)) / 3, "down": jax.random.normal(k2, (16,)) / 4}


def losses_of(params, batch):
    scores = jnp.tanh(batch["docs"] @ params["up"]) @ params["down"]
    log_p = jax.nn.log_softmax(jnp.where(batch["there"], scores, -1e9))
    return -jnp.where(batch["there"], batch["clicks"] * log_p, 0).sum(-1)


def weight_of(batch):
    return jnp.where(batch["there"], batch["clicks"], 0).sum(-1)


optimizer = optax.adam(1e-2)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain():
    loss_of = lambda params, batch: losses_of(params, batch).sum() / weight_of(batch).sum()
    return train_plain(init, loss_of, optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    clicks = weight_of(batch)
    return sk.mean(losses_of(params, batch) / jnp.maximum(clicks, 1), weights=clicks)


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])


# ---- checks ----------------------------------------------------------------------------------------------------------

SETTINGS = {"data": {"shuffle": False, "drop_remainder": False}}
