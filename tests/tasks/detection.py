"""Detection: boxes over the objects that are there, classes over all places, and a penalty."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import train_plain

# ---- shared ----------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {
    "x": random.normal(size=(64, 5, 8)).astype(np.float32),
    "box": random.uniform(size=(64, 5, 4)).astype(np.float32),
    "kind": (random.integers(0, 3, (64, 5)) * (random.uniform(size=(64, 5)) < np.linspace(0.1, 1, 64)[:, None])).astype(
        np.int32
    ),
}


def init(key):
    k1, k2, k3 = jax.random.split(key, 3)
    heads = {"box": jax.random.normal(k2, (16, 4)) / 4, "kind": jax.random.normal(k3, (16, 3)) / 4}
    return {"up": jax.random.normal(k1, (8, 16)) / 3} | heads


def terms(params, batch):
    """Of each place: how far its box is off, how wrong its class."""
    h = jnp.tanh(batch["x"] @ params["up"])
    off = optax.huber_loss(h @ params["box"], batch["box"]).sum(-1)
    return off, optax.softmax_cross_entropy_with_integer_labels(h @ params["kind"], batch["kind"])


optimizer = optax.adam(1e-2)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def loss_of(params, batch):
    off, wrong = terms(params, batch)
    there = batch["kind"] > 0
    return 2.0 * (off * there).sum() / there.sum() + wrong.mean() + 1e-3 * optax.tree.norm(params, squared=True)


def plain():
    return train_plain(init, loss_of, optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    off, wrong = terms(params, batch)
    boxes, kinds = sk.mean(off, where=batch["kind"] > 0), sk.mean(wrong)
    return 2.0 * boxes + kinds + 1e-3 * optax.tree.norm(params, squared=True), {"boxes": boxes, "kinds": kinds}


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])
