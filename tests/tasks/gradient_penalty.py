"""A critic with a penalty on its gradient at points between real and made examples (WGAN-GP)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import example_keys, train_plain

# ---- shared ----------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {k: random.normal(size=(64, 8)).astype(np.float32) for k in ("real", "made")}


def init(key):
    k1, k2 = jax.random.split(key)
    return {"w1": jax.random.normal(k1, (8, 32)) / 3, "w2": jax.random.normal(k2, (32,)) / 5}


def critic(params, x):
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


def losses_of(params, batch, keys):
    t = jax.vmap(jax.random.uniform)(keys)[:, None]
    between = t * batch["real"] + (1 - t) * batch["made"]
    slope = jax.vmap(jax.grad(critic, argnums=1), (None, 0))(params, between)
    penalty = (jnp.sqrt((slope**2).sum(-1) + 1e-8) - 1) ** 2
    return critic(params, batch["made"]) - critic(params, batch["real"]) + 10 * penalty


optimizer = optax.sgd(0.05)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain():
    loss_of = lambda params, batch, keys: losses_of(params, batch, keys).mean()
    return train_plain(init, loss_of, optimizer, DATA, keys_of=example_keys)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch, sk.example_keys()))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("w1", [None, "mlp"])])
