"""SimCLR: each view finds the other one among all views of the whole batch, its own left out."""

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
    return {"up": jax.random.normal(k1, (12, 16)) / 3, "down": jax.random.normal(k2, (16, 6)) / 4}


def embed(params, x):
    z = jax.nn.relu(x @ params["up"]) @ params["down"]
    return z / jnp.linalg.norm(z + 1e-6, axis=-1, keepdims=True)


def views(x, keys):
    noise = jax.vmap(lambda k: jax.random.normal(k, (2, 12)))(keys)
    return x + 0.1 * noise[:, 0], x + 0.1 * noise[:, 1]


optimizer = optax.adam(1e-2)


# ---- plain JAX, one device ------------------------------------------------------------------------------------------


def losses_of(params, batch, keys):
    a, b = (embed(params, x) for x in views(batch["x"], keys))
    z = jnp.concatenate([a, b])
    similarity = jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, 5 * z @ z.T)
    others = jnp.roll(jnp.arange(len(z)), len(a))
    return optax.softmax_cross_entropy_with_integer_labels(similarity, others)


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
    a, b = (embed(params, x) for x in views(batch["x"], sk.example_keys()))
    all_a, all_b = sk.all_gather((a, b))
    own, ce = sk.replica_index() * len(a) + jnp.arange(len(a)), optax.softmax_cross_entropy_with_integer_labels
    itself = own[:, None] == jnp.arange(len(all_a))

    def find(x, others, same):
        similarity = [5 * x @ others.T, jnp.where(itself, -jnp.inf, 5 * x @ same.T)]
        return ce(jnp.concatenate(similarity, -1), own)

    return sk.mean((find(a, all_b, all_a) + find(b, all_a, all_b)) / 2)


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])

# ---- test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", QUICK)
def test_it_is_the_plain_script(mesh):
    assert_same(train(task, mesh), plain())
