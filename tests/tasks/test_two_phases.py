"""Pretraining on one target, then fine-tuning a new head on another from the same body."""

from functools import partial

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
    k1, k2 = jax.random.split(key)
    return {"body": jax.random.normal(k1, (12, 16)) / 3, "head": jax.random.normal(k2, (16, 12)) / 4}


def reconstruction(params, batch):
    return ((jnp.tanh(batch["x"] @ params["body"]) @ params["head"] - batch["x"]) ** 2).sum(-1)


def classification(params, batch):
    logits = jnp.tanh(batch["x"] @ params["body"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


first, second = optax.adam(1e-2), optax.sgd(0.1)


# ---- plain JAX, one device ------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=(0, 1))
def plain_step(losses_of, optimizer, params, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda params: losses_of(params, batch).mean())(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def phase(losses_of, optimizer, params):
    opt_state, losses = optimizer.init(params), []
    for batch in batches(DATA):
        params, opt_state, loss = plain_step(losses_of, optimizer, params, opt_state, batch)
        losses.append(loss)
    return losses, params, opt_state


def plain():
    before = phase(reconstruction, first, init(jax.random.key(0)))
    return before, phase(classification, second, {"body": before[1]["body"], "head": jnp.zeros((16, 4))})


# ---- spmdkit --------------------------------------------------------------------------------------------------------

rules = [("body", [None, "mlp"])]
pretraining = sk.Task(
    init, lambda params, batch, key: sk.mean(reconstruction(params, batch)), first, train_data=DATA, rules=rules
)


def finetuning(params):
    init = lambda key: {"body": params["body"], "head": jnp.zeros((16, 4))}
    loss_fn = lambda params, batch, key: sk.mean(classification(params, batch))
    return sk.Task(init, loss_fn, second, train_data=DATA, rules=rules)


# ---- test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", QUICK)
def test_it_is_the_plain_script(mesh):
    before = train(pretraining, mesh)
    for found, expected in zip([before, train(finetuning(before.params), mesh)], plain(), strict=True):
        assert_same(found, expected)
