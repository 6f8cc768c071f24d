"""DP-SGD: each example's gradient is clipped before all are added, and noise on top."""

import jax
import jax.numpy as jnp
import optax

import spmdkit as sk
from tests.support.tasks import batches, step_key
from tests.tasks.classifier import DATA, init

# ---- shared ----------------------------------------------------------------------------------------------------------


def loss_of(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x @ params["up"]) @ params["down"], y)


def clipped(grads):
    """Of all examples, each scaled to a norm of at most 0.5, their mean."""
    norms = jnp.sqrt(sum((g**2).sum(tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads)))
    scale = jnp.minimum(1, 0.5 / norms)
    return jax.tree.map(lambda g: jnp.tensordot(scale, g, 1) / len(scale), grads)


def noisy(grads, key):
    leaves, tree = jax.tree.flatten(grads)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        tree, [g + 0.01 * jax.random.normal(k, g.shape) for g, k in zip(leaves, keys, strict=True)]
    )


by_example = jax.vmap(jax.value_and_grad(loss_of), (None, 0, 0))
optimizer = optax.sgd(0.3)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


@jax.jit
def plain_step(params, opt_state, batch, key):
    losses, grads = by_example(params, batch["x"], batch["y"])
    updates, opt_state = optimizer.update(noisy(clipped(grads), key), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, losses.mean()


def plain():
    params, losses = init(jax.random.key(0)), []
    opt_state = optimizer.init(params)
    for step, batch in enumerate(batches(DATA)):
        params, opt_state, loss = plain_step(params, opt_state, batch, step_key(step))
        losses.append(loss)
    return losses, params, opt_state


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def train_step(state, batch):
    losses, grads = by_example(state.params, batch["x"], batch["y"])
    return state.apply_gradients(noisy(clipped(grads), state.key)), {"loss": losses.mean()}


task = sk.Task(init, train_step=train_step, optimizer=optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])
