"""Pretraining on one target, then fine-tuning a new head on another from the same body."""

import functools

import jax
import jax.numpy as jnp
import optax

import spmdkit as sk
from tests.support.tasks import train_plain
from tests.tasks.classifier import DATA

# ---- shared ----------------------------------------------------------------------------------------------------------


def init(key):
    k1, k2 = jax.random.split(key)
    return {"body": jax.random.normal(k1, (12, 16)) / 3, "head": jax.random.normal(k2, (16, 12)) / 4}


def reconstruction(params, batch):
    return ((jnp.tanh(batch["x"] @ params["body"]) @ params["head"] - batch["x"]) ** 2).sum(-1)


def classification(params, batch):
    logits = jnp.tanh(batch["x"] @ params["body"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


first, second = optax.adam(1e-2), optax.sgd(0.1)


@functools.cache
def pretrained_body():
    """Returns the body that the plain script pretrains."""
    return plain_pretraining()[1]["body"]


def init_finetuning(key):
    return {"body": pretrained_body(), "head": jnp.zeros((16, 4))}


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain_pretraining():
    return train_plain(init, lambda params, batch: reconstruction(params, batch).mean(), first, DATA)


def plain_finetuning():
    loss_of = lambda params, batch: classification(params, batch).mean()
    return train_plain(init_finetuning, loss_of, second, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------

rules = [("body", [None, "mlp"])]
pretraining = sk.Task(
    init, lambda params, batch, key: sk.mean(reconstruction(params, batch)), first, train_data=DATA, rules=rules
)
finetuning = sk.Task(
    init_finetuning,
    lambda params, batch, key: sk.mean(classification(params, batch)),
    second,
    train_data=DATA,
    rules=rules,
)


# ---- checks ----------------------------------------------------------------------------------------------------------

VARIANTS = {
    "pretraining": (pretraining, plain_pretraining),
    "finetuning": (finetuning, plain_finetuning),
}
