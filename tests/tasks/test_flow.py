"""A normalizing flow of affine couplings, by the change of variables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.tasks import QUICK, assert_same, batches, train

# ---- shared ---------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {"x": random.normal(size=(64, 12)).astype(np.float32), "y": random.integers(0, 4, 64).astype(np.int32)}


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


# ---- plain JAX, one device ------------------------------------------------------------------------------------------


@jax.jit
def plain_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda params: losses_of(params, batch).mean())(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def plain():
    params, losses = init(jax.random.key(0)), []
    opt_state = optimizer.init(params)
    for batch in batches(DATA):
        params, opt_state, loss = plain_step(params, opt_state, batch)
        losses.append(loss)
    return losses, params, opt_state


# ---- spmdkit --------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[(".*/up", [None, "mlp"])])

# ---- test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", QUICK)
def test_it_is_the_plain_script(mesh):
    assert_same(train(task, mesh), plain())
