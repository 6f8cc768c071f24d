"""Tagging of sequences of different lengths: a mean over tokens, not over padding, and a short last batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.tasks import QUICK, assert_same, batches, train

# ---- shared ---------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
LENGTHS = random.integers(1, 7, 56)
DATA = {
    "x": random.normal(size=(56, 6, 8)).astype(np.float32),
    "tag": random.integers(0, 3, (56, 6)).astype(np.int32),
    "real": np.arange(6) < LENGTHS[:, None],
}


def init(key):
    k1, k2 = jax.random.split(key)
    return {"up": jax.random.normal(k1, (8, 16)) / 3, "down": jax.random.normal(k2, (16, 3)) / 4}


def losses_of(params, batch):
    logits = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tag"])


optimizer = optax.adamw(1e-2)


# ---- plain JAX, one device ------------------------------------------------------------------------------------------


@jax.jit
def plain_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda params: jnp.mean(losses_of(params, batch), where=batch["real"]))(params)
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
    return sk.mean(losses_of(params, batch), where=batch["real"])


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])

# ---- test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", QUICK)
def test_it_is_the_plain_script(mesh):
    assert_same(train(task, mesh, data={"shuffle": False, "drop_remainder": False}), plain())
