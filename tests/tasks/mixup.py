"""Mixup with partners from the whole batch, and soft labels."""

import jax
import jax.numpy as jnp
import optax

import spmdkit as sk
from tests.support.tasks import example_keys, train_plain
from tests.tasks.classifier import DATA, init

# ---- shared ----------------------------------------------------------------------------------------------------------


def losses_of(params, x, y):
    return optax.softmax_cross_entropy(jnp.tanh(x @ params["up"]) @ params["down"], y)


def mixed(x, other, keys):
    lam = jax.vmap(jax.random.uniform)(keys)[:, None]
    return lam * x + (1 - lam) * other


optimizer = optax.sgd(0.2)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def loss_of(params, batch, keys):
    x, y = batch["x"], jax.nn.one_hot(batch["y"], 4)
    return losses_of(params, mixed(x, x[::-1], keys), mixed(y, y[::-1], keys)).mean()


def plain():
    return train_plain(init, loss_of, optimizer, DATA, keys_of=example_keys)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    x, y, keys = batch["x"], jax.nn.one_hot(batch["y"], 4), sk.example_keys()
    num, first = len(x), sk.replica_index() * len(x)
    others = sk.all_gather((x, y))  # the partner of a row is the one that stands as far from the end of the batch
    partner = lambda rows: jax.lax.dynamic_slice_in_dim(rows[::-1], first, num)
    return sk.mean(losses_of(params, mixed(x, partner(others[0]), keys), mixed(y, partner(others[1]), keys)))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])
