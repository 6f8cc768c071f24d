"""Distillation: a large teacher that stays as it is, in the model state, and a small student."""

import jax
import jax.numpy as jnp
import optax

import spmdkit as sk
from tests.support.tasks import train_plain
from tests.tasks.classifier import DATA

# ---- shared ----------------------------------------------------------------------------------------------------------


def net(key, width):
    k1, k2 = jax.random.split(key)
    return {"up": jax.random.normal(k1, (12, width)) / 3, "down": jax.random.normal(k2, (width, 4)) / width**0.5}


def apply(net, x):
    return jnp.tanh(x @ net["up"]) @ net["down"]


def losses_of(student, teacher, batch):
    of_teacher, logits = jax.nn.softmax(apply(teacher, batch["x"]) / 2), apply(student, batch["x"])
    soft = optax.softmax_cross_entropy(logits / 2, of_teacher)
    return soft + 0.5 * optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


TEACHER = net(jax.random.key(9), 64)
optimizer = optax.adam(1e-2)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain():
    loss_of = lambda params, batch: losses_of(params, TEACHER, batch).mean()
    return train_plain(lambda key: net(key, 16), loss_of, optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def init_both(key):
    return sk.Variables(net(key, 16), TEACHER)


def loss_fn(student, teacher, batch, key):
    return sk.mean(losses_of(student, teacher, batch)), {}, teacher


task = sk.Task(init_both, loss_fn, optimizer, train_data=DATA, rules=[(".*up", [None, "mlp"])])
