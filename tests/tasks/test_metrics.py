"""Precision at the end: F1, AUC, accuracy by class and a confusion matrix of a whole test set, and perplexity."""

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
    return {"up": jax.random.normal(k1, (12, 16)) / 3, "down": jax.random.normal(k2, (16, 4)) / 4}


def logits_of(params, batch):
    return jnp.tanh(batch["x"] @ params["up"]) @ params["down"]


def losses_of(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch), batch["y"])


optimizer = optax.sgd(0.3)
TEST = jax.tree.map(lambda x: x[:61], DATA)


def f1(c):
    """Of each class of a confusion matrix [label, prediction]."""
    return 2 * c.diagonal() / (c.sum(0) + c.sum(1)).clip(1)


def auc(c):
    """Of class 0 against the rest, from histograms [is it, bin of the score]."""
    no, yes = c / c.sum(1, keepdims=True).clip(1)
    below = no.cumsum() - no
    return (yes * (below + no / 2)).sum()


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


def plain_metrics(params):
    logits = np.asarray(logits_of(params, TEST))
    matrix, table = np.zeros((4, 4)), np.zeros((2, 20))
    np.add.at(matrix, (TEST["y"], logits.argmax(-1)), 1)
    score = np.asarray(jax.nn.softmax(logits))[:, 0]
    np.add.at(table, ((TEST["y"] == 0).astype(int), np.minimum(score * 20, 19).astype(int)), 1)
    perplexity = np.exp(np.asarray(losses_of(params, TEST)).mean())
    return {"matrix": matrix, "f1": f1(matrix), "auc": auc(table), "perplexity": perplexity}


# ---- spmdkit --------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


def eval_fn(params, batch):
    logits = logits_of(params, batch)
    matrix = sk.bincount((batch["y"], logits.argmax(-1)), (4, 4))
    bins = jnp.minimum(jax.nn.softmax(logits)[:, 0] * 20, 19).astype(jnp.int32)
    histogram = sk.bincount(((batch["y"] == 0).astype(jnp.int32), bins), (2, 20))
    perplexity = sk.derived(jnp.exp, sk.mean(losses_of(params, batch)))
    return {"matrix": matrix, "f1": sk.derived(f1, matrix), "auc": sk.derived(auc, histogram), "perplexity": perplexity}


task = sk.Task(
    init, loss_fn, optimizer, train_data=DATA, eval_data=TEST, eval_fn=eval_fn, rules=[("up", [None, "mlp"])]
)

# ---- test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", QUICK)
def test_it_is_the_plain_script(mesh):
    run = train(task, mesh)
    assert_same(run, plain())
    found = run.program.eval(jax.device_put(run.state, run.program.state_sharding))
    for name, value in plain_metrics(run.params).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
