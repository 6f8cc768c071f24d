"""Distillation: a large teacher that stays as it is, in the model state, and a small student."""

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


def net(key, width):
    k1, k2 = jax.random.split(key)
    return {"up": jax.random.normal(k1, (12, width)) / 3, "down": jax.random.normal(k2, (width, 4)) / width**0.5}


def apply(net, x):
    return jnp.tanh(x @ net["up"]) @ net["down"]


def losses_of(student, teacher, batch):
    of_teacher, logits = jax.nn.softmax(apply(teacher, batch["x"]) / 2), apply(student, batch["x"])
    soft = optax.softmax_cross_entropy(logits / 2, of_teacher)
    return soft + 0.5 * optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


TEACHER = net(jax.random.key(9), 64)
optimizer = optax.adam(1e-2)


# ---- plain JAX, one device ------------------------------------------------------------------------------------------

init = lambda key: net(key, 16)


@jax.jit
def plain_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda params: losses_of(params, TEACHER, batch).mean())(params)
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


def init_both(key):
    return sk.Variables(net(key, 16), TEACHER)


def loss_fn(student, teacher, batch, key):
    return sk.mean(losses_of(student, teacher, batch)), {}, teacher


task = sk.Task(init_both, loss_fn, optimizer, train_data=DATA, rules=[(".*up", [None, "mlp"])])

# ---- test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", QUICK)
def test_it_is_the_plain_script(mesh):
    assert_same(train(task, mesh), plain())
