"""A variational autoencoder: a draw for each example, reconstruction and divergence."""

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


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("encoder/up", [None, "mlp"])])

# ---- test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", QUICK)
def test_it_is_the_plain_script(mesh):
    assert_same(train(task, mesh), plain())
