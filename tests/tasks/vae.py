"""A variational autoencoder: a draw for each example, reconstruction and divergence."""

import jax
import jax.numpy as jnp
import optax

import spmdkit as sk
from tests.support.tasks import example_keys, train_plain
from tests.tasks.classifier import DATA

# ---- shared ----------------------------------------------------------------------------------------------------------


def init(key):
    k = jax.random.split(key, 4)
    coder = {
        "up": jax.random.normal(k[0], (12, 16)) / 3,
        "mean": jax.random.normal(k[1], (16, 3)) / 4,
        "log_var": jnp.zeros((16, 3)),
    }
    return {
        "encoder": coder,
        "decoder": {"up": jax.random.normal(k[2], (3, 16)), "down": jax.random.normal(k[3], (16, 12)) / 4},
    }


def losses_of(params, batch, keys):
    e, d = params["encoder"], params["decoder"]
    h = jnp.tanh(batch["x"] @ e["up"])
    mean, log_var = h @ e["mean"], h @ e["log_var"]
    z = mean + jnp.exp(log_var / 2) * jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys)
    error = ((jnp.tanh(z @ d["up"]) @ d["down"] - batch["x"]) ** 2).sum(-1)
    return error + 0.5 * (jnp.exp(log_var) + mean**2 - 1 - log_var).sum(-1)


optimizer = optax.adam(1e-2)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain():
    loss_of = lambda params, batch, keys: losses_of(params, batch, keys).mean()
    return train_plain(init, loss_of, optimizer, DATA, keys_of=example_keys)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch, sk.example_keys()))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("encoder/up", [None, "mlp"])])
