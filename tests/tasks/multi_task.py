"""Two tasks in one batch, each on the rows that have a label, weighed by what is learned about their noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import train_plain

# ---- shared ----------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {
    "x": random.normal(size=(64, 12)).astype(np.float32),
    "value": random.normal(size=64).astype(np.float32),
    "kind": random.integers(0, 3, 64).astype(np.int32),
    "has_kind": random.uniform(size=64) < np.linspace(0.15, 0.9, 64),
}


def init(key):
    k1, k2, k3 = jax.random.split(key, 3)
    heads = {"value": jax.random.normal(k2, (16,)) / 4, "kind": jax.random.normal(k3, (16, 3)) / 4}
    return {"up": jax.random.normal(k1, (12, 16)) / 3, "heads": heads, "log_var": jnp.array([0.5, -0.5])}


def terms(params, batch):
    h = jnp.tanh(batch["x"] @ params["up"])
    off = (h @ params["heads"]["value"] - batch["value"]) ** 2
    return off, optax.softmax_cross_entropy_with_integer_labels(h @ params["heads"]["kind"], batch["kind"])


optimizer = optax.adam(1e-2)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def loss_of(params, batch):
    off, wrong = terms(params, batch)
    a, b = jnp.exp(-params["log_var"])
    return a * off.mean() + b * jnp.mean(wrong, where=batch["has_kind"]) + params["log_var"].sum() / 2


def plain():
    return train_plain(init, loss_of, optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    off, wrong = terms(params, batch)
    a, b = jnp.exp(-params["log_var"])
    return a * sk.mean(off) + b * sk.mean(wrong, where=batch["has_kind"]) + params["log_var"].sum() / 2


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])
