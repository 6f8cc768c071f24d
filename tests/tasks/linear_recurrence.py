"""A linear recurrence with complex eigenvalues (LRU): two real leaves, one complex number."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import train_plain

# ---- shared ----------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {"x": random.normal(size=(64, 9, 4)).astype(np.float32), "y": random.normal(size=64).astype(np.float32)}


def init(key):
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "eigenvalue": {"log_radius": jnp.log(jnp.linspace(0.05, 0.4, 8)), "angle": jnp.linspace(0.1, 3.0, 8)},
        "in": {"re": jax.random.normal(k1, (4, 8)) / 2, "im": jax.random.normal(k2, (4, 8)) / 2},
        "out": jax.random.normal(k3, (16,)) / 4,
    }


def losses_of(params, batch):
    radius, angle = jnp.exp(-jnp.exp(params["eigenvalue"]["log_radius"])), params["eigenvalue"]["angle"]
    a = jax.lax.complex(radius * jnp.cos(angle), radius * jnp.sin(angle))
    u = batch["x"] @ jax.lax.complex(params["in"]["re"], params["in"]["im"])
    combine = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
    _, h = jax.lax.associative_scan(combine, (jnp.broadcast_to(a, u.shape), u), axis=1)
    last = jnp.concatenate([h[:, -1].real, h[:, -1].imag], -1)
    return (last @ params["out"] - batch["y"]) ** 2


optimizer = optax.adam(1e-2)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain():
    return train_plain(init, lambda params, batch: losses_of(params, batch).mean(), optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("in/.*", [None, "mlp"])])
