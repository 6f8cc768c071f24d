"""LoRA: a frozen base and adapters of low rank, frozen by `optax.multi_transform`."""

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
    k1, k2, k3 = jax.random.split(key, 3)
    base = {"up": jax.random.normal(k1, (12, 32)) / 3, "down": jax.random.normal(k2, (32, 4)) / 5}
    lora = {"A": jax.random.normal(k3, (12, 2)), "B": jnp.zeros((2, 32))}
    return {"base": base, "lora": lora}


def losses_of(params, batch):
    base, lora = params["base"], params["lora"]
    h = jax.nn.relu(batch["x"] @ base["up"] + batch["x"] @ lora["A"] @ lora["B"])
    return optax.softmax_cross_entropy_with_integer_labels(h @ base["down"], batch["y"])


kinds = {"base": "frozen", "lora": "trained"}
optimizer = optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optax.sgd(0.1, momentum=0.9)}, kinds)


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


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("base/up|lora/B", [None, "mlp"])])

# ---- test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", QUICK)
def test_it_is_the_plain_script(mesh):
    assert_same(train(task, mesh), plain())
