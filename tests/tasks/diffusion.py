"""A denoising diffusion model: a time and a noise for each example."""

import jax
import jax.numpy as jnp
import optax

import spmdkit as sk
from tests.support.tasks import example_keys, train_plain
from tests.tasks.classifier import DATA

# ---- shared ----------------------------------------------------------------------------------------------------------


def init(key):
    k1, k2 = jax.random.split(key)
    return {"up": jax.random.normal(k1, (13, 32)) / 3, "down": jax.random.normal(k2, (32, 12)) / 5}


def losses_of(params, batch, keys):
    def one(x, key):
        of_time, of_noise = jax.random.split(key)
        t, noise = jax.random.uniform(of_time), jax.random.normal(of_noise, x.shape)
        alpha = jnp.cos(t * jnp.pi / 2) ** 2
        noisy = jnp.sqrt(alpha) * x + jnp.sqrt(1 - alpha) * noise
        h = jax.nn.silu(jnp.append(noisy, t) @ params["up"])
        return ((h @ params["down"] - noise) ** 2).mean()

    return jax.vmap(one)(batch["x"], keys)


optimizer = optax.adam(1e-2)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain():
    loss_of = lambda params, batch, keys: losses_of(params, batch, keys).mean()
    return train_plain(init, loss_of, optimizer, DATA, keys_of=example_keys)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch, sk.example_keys()))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])
