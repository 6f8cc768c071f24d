"""MAML: a task for each example, an inner step of gradient descent, and the derivative through it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.tasks import QUICK, assert_same, batches, train

# ---- shared ---------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {
    k: random.normal(size=(64, 5, n)).astype(np.float32) for k, n in (("x", 3), ("y", 1), ("x_test", 3), ("y_test", 1))
}


def init(key):
    k1, k2 = jax.random.split(key)
    return {"up": jax.random.normal(k1, (3, 16)) / 2, "down": jax.random.normal(k2, (16, 1)) / 4}


def error(params, x, y):
    return ((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2).mean()


def losses_of(params, batch):
    def of_task(task):
        inner = jax.grad(error)(params, task["x"], task["y"])
        adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, inner)
        return error(adapted, task["x_test"], task["y_test"])

    return jax.vmap(of_task)(batch)


optimizer = optax.sgd(0.1)


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


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])

# ---- test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", QUICK)
def test_it_is_the_plain_script(mesh):
    assert_same(train(task, mesh), plain())
