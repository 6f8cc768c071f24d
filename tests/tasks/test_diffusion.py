"""A denoising diffusion model: a time and a noise for each example."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.tasks import QUICK, assert_same, batches, example_keys, train

# ---- shared ---------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {"x": random.normal(size=(64, 12)).astype(np.float32), "y": random.integers(0, 4, 64).astype(np.int32)}


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


# ---- plain JAX, one device ------------------------------------------------------------------------------------------


@jax.jit
def plain_step(params, opt_state, batch, keys):
    loss, grads = jax.value_and_grad(lambda params: losses_of(params, batch, keys).mean())(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def plain():
    params, losses = init(jax.random.key(0)), []
    opt_state = optimizer.init(params)
    for step, batch in enumerate(batches(DATA)):
        params, opt_state, loss = plain_step(params, opt_state, batch, example_keys(step))
        losses.append(loss)
    return losses, params, opt_state


# ---- spmdkit --------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch, sk.example_keys()))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])

# ---- test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", QUICK)
def test_it_is_the_plain_script(mesh):
    assert_same(train(task, mesh), plain())
