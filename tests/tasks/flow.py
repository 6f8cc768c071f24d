"""A normalizing flow of affine couplings, by the change of variables."""

import jax
import jax.numpy as jnp
import optax

import spmdkit as sk
from tests.support.tasks import train_plain
from tests.tasks.classifier import DATA

# ---- shared ----------------------------------------------------------------------------------------------------------


def init(key):
    keys = jax.random.split(key, 4)
    layer = lambda k: {
        "up": jax.random.normal(k, (6, 16)) / 3,
        "scale": jnp.zeros((16, 6)),
        "shift": 0.1 * jax.random.normal(k, (16, 6)),
    }
    return [layer(k) for k in keys]


def losses_of(params, batch):
    """Minus the log-likelihood."""
    z, log_det = batch["x"], jnp.zeros(len(batch["x"]))
    for layer in params:
        a, b = jnp.split(z, 2, -1)
        h = jnp.tanh(a @ layer["up"])
        s = jnp.tanh(h @ layer["scale"])
        z = jnp.concatenate([b * jnp.exp(s) + h @ layer["shift"], a], -1)
        log_det = log_det + s.sum(-1)
    return 0.5 * (z**2).sum(-1) - log_det


optimizer = optax.adam(1e-3)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain():
    return train_plain(init, lambda params, batch: losses_of(params, batch).mean(), optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[(".*/up", [None, "mlp"])])
