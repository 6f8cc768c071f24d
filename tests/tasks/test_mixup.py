"""Mixup with partners from the whole batch, and soft labels."""

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
    return {"up": jax.random.normal(k1, (12, 16)) / 3, "down": jax.random.normal(k2, (16, 4)) / 4}


def losses_of(params, x, y):
    return optax.softmax_cross_entropy(jnp.tanh(x @ params["up"]) @ params["down"], y)


def mixed(x, other, keys):
    lam = jax.vmap(jax.random.uniform)(keys)[:, None]
    return lam * x + (1 - lam) * other


optimizer = optax.sgd(0.2)


# ---- plain JAX, one device ------------------------------------------------------------------------------------------


@jax.jit
def plain_step(params, opt_state, batch, keys):
    x, y = batch["x"], jax.nn.one_hot(batch["y"], 4)
    loss_of = lambda params: losses_of(params, mixed(x, x[::-1], keys), mixed(y, y[::-1], keys)).mean()
    loss, grads = jax.value_and_grad(loss_of)(params)
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
    x, y, keys = batch["x"], jax.nn.one_hot(batch["y"], 4), sk.example_keys()
    num, first = len(x), sk.replica_index() * len(x)
    others = sk.all_gather((x, y))  # the partner of a row is the one that stands as far from the end of the batch
    partner = lambda rows: jax.lax.dynamic_slice_in_dim(rows[::-1], first, num)
    return sk.mean(losses_of(params, mixed(x, partner(others[0]), keys), mixed(y, partner(others[1]), keys)))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])

# ---- test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", QUICK)
def test_it_is_the_plain_script(mesh):
    assert_same(train(task, mesh), plain())
