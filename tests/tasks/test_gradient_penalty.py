"""A critic with a penalty on its gradient at points between real and made examples (WGAN-GP)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.tasks import QUICK, assert_same, batches, example_keys, train

# ---- shared ---------------------------------------------------------------------------------------------------------

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


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("w1", [None, "mlp"])])

# ---- test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", QUICK)
def test_it_is_the_plain_script(mesh):
    assert_same(train(task, mesh), plain())
