"""Precision at the end: F1, AUC, accuracy by class and a confusion matrix of a whole test set, and perplexity."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import check_evaluation, train_plain
from tests.tasks.classifier import DATA, init, logits_of, losses_of

# ---- shared ----------------------------------------------------------------------------------------------------------

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


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain_metrics(params):
    logits = np.asarray(logits_of(params, TEST))
    matrix, table = np.zeros((4, 4)), np.zeros((2, 20))
    np.add.at(matrix, (TEST["y"], logits.argmax(-1)), 1)
    score = np.asarray(jax.nn.softmax(logits))[:, 0]
    np.add.at(table, ((TEST["y"] == 0).astype(int), np.minimum(score * 20, 19).astype(int)), 1)
    perplexity = np.exp(np.asarray(losses_of(params, TEST)).mean())
    return {"matrix": matrix, "f1": f1(matrix), "auc": auc(table), "perplexity": perplexity}


def plain():
    return train_plain(init, lambda params, batch: losses_of(params, batch).mean(), optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


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


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(trained):
    check_evaluation(trained, plain_metrics(trained.params))
