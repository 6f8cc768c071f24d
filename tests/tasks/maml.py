"""MAML: a task for each example, an inner step of gradient descent, and the derivative through it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import train_plain

# ---- shared ----------------------------------------------------------------------------------------------------------

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


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain():
    return train_plain(init, lambda params, batch: losses_of(params, batch).mean(), optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])
