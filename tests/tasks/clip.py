"""CLIP: the negatives of an example are all others of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import train_plain

# ---- shared ----------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {k: random.normal(size=(64, n)).astype(np.float32) for k, n in (("image", 12), ("text", 6))}


def init(key):
    a, b = jax.random.split(key)
    w = {"image": jax.random.normal(a, (12, 8)) / 3, "text": jax.random.normal(b, (6, 8)) / 2}
    return w | {"scale": jnp.log(10.0)}


def encode(params, batch):
    z = {k: jnp.tanh(batch[k] @ params[k]) for k in ("image", "text")}
    return [x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in z.values()]


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain_loss(params, batch):
    a, b = encode(params, batch)
    logits = jnp.exp(params["scale"]) * a @ b.T
    labels = jnp.arange(len(a))
    ce = optax.softmax_cross_entropy_with_integer_labels
    return (ce(logits, labels) + ce(logits.T, labels)).mean() / 2


def plain():
    return train_plain(init, plain_loss, optax.adam(1e-2), DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    a, b = encode(params, batch)
    (all_a, all_b), real = sk.all_gather((a, b), with_mask=True)
    scale, labels = jnp.exp(params["scale"]), sk.replica_index() * len(a) + jnp.arange(len(a))
    find = lambda x, others: jnp.where(real, scale * x @ others.T, -jnp.inf)
    ce = optax.softmax_cross_entropy_with_integer_labels
    return sk.mean(ce(find(a, all_b), labels) + ce(find(b, all_a), labels)) / 2


task = sk.Task(init, loss_fn, optax.adam(1e-2), train_data=DATA, rules=[("image|text", [None, "mlp"])])
