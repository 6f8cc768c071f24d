"""A physics-informed network: no data, new collocation points in each step, shared out by the replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import STEPS, step_key

# ---- shared ----------------------------------------------------------------------------------------------------------

N = 64


def init(key):
    k1, k2 = jax.random.split(key)
    return {"w1": jax.random.normal(k1, (2, 32)), "b1": jnp.zeros(32), "w2": jax.random.normal(k2, (32,)) / 5}


def u(params, t, x):
    return jnp.tanh(jnp.array([t, x]) @ params["w1"] + params["b1"]) @ params["w2"]


def residual(params, point):
    """Of the heat equation, with u(0, x) = sin(pi x)."""
    t, x = point
    u_t = jax.grad(u, 1)(params, t, x)
    u_xx = jax.grad(jax.grad(u, 2), 2)(params, t, x)
    return (u_t - 0.1 * u_xx) ** 2 + (u(params, 0.0, x) - jnp.sin(jnp.pi * x)) ** 2


def loss_of(params, points):
    return jax.vmap(residual, (None, 0))(params, points).mean()


optimizer = optax.sgd(0.05)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


@jax.jit
def plain_step(params, opt_state, key):
    loss, grads = jax.value_and_grad(loss_of)(params, jax.random.uniform(key, (N, 2)))
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def plain():
    params, losses = init(jax.random.key(0)), []
    opt_state = optimizer.init(params)
    for step in range(STEPS):
        params, opt_state, loss = plain_step(params, opt_state, step_key(step))
        losses.append(loss)
    return losses, params, opt_state


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def train_step(state, batch):
    points = sk.shard(jax.random.uniform(state.key, (N, 2)), "rows", None)
    loss, grads = jax.value_and_grad(loss_of)(state.params, points)
    return state.apply_gradients(grads), {"loss": loss}


steps = np.zeros(1024, np.int32)  # a task has data: here only how many steps there are
task = sk.Task(init, train_step=train_step, optimizer=optimizer, train_data=steps, rules=[("w1", [None, "mlp"])])


# ---- checks ----------------------------------------------------------------------------------------------------------


def repeating(state, batch):
    """The same without `sk.shard`: every replica computes all points."""
    loss, grads = jax.value_and_grad(loss_of)(state.params, jax.random.uniform(state.key, (N, 2)))
    return state.apply_gradients(grads), {"loss": loss}


REPEATED_LINES = ('return jnp.tanh(jnp.array([t, x]) @ params["w1"] + params["b1"]) @ params["w2"]',)
