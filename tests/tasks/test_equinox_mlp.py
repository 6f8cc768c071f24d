"""An equinox module: its arrays are trained, its functions are not."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.tasks import QUICK, assert_same, batches, train

# ---- shared ---------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {"x": random.normal(size=(64, 12)).astype(np.float32), "y": random.integers(0, 4, 64).astype(np.int32)}


def make(key):
    return eqx.nn.MLP(12, 4, 16, 1, activation=jax.nn.gelu, key=key)


def losses_of(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(batch["x"]), batch["y"])


optimizer = optax.adamw(1e-2)


# ---- plain JAX, one device ------------------------------------------------------------------------------------------


@eqx.filter_jit
def plain_step(model, opt_state, batch):
    loss, grads = eqx.filter_value_and_grad(lambda model: losses_of(model, batch).mean())(model)
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def plain():
    model, losses = make(jax.random.key(0)), []
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    for batch in batches(DATA):
        model, opt_state, loss = plain_step(model, opt_state, batch)
        losses.append(loss)
    return losses, eqx.filter(model, eqx.is_array), opt_state


# ---- spmdkit --------------------------------------------------------------------------------------------------------

static = eqx.filter(make(jax.random.key(0)), eqx.is_array, inverse=True)


def init(key):
    return eqx.filter(make(key), eqx.is_array)


def loss_fn(params, batch, key):
    return sk.mean(losses_of(eqx.combine(params, static), batch))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("layers/0/weight", ["mlp", None])])

# ---- test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", QUICK)
def test_it_is_the_plain_script(mesh):
    assert_same(train(task, mesh), plain())
