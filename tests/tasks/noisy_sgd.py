"""An optimizer that draws noise: its state holds a random key."""

import jax
import optax

import spmdkit as sk
from tests.support.tasks import train_plain
from tests.tasks.classifier import DATA, init, losses_of

# ---- shared ----------------------------------------------------------------------------------------------------------

optimizer = optax.noisy_sgd(0.1, eta=0.01, key=jax.random.key(7))


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain():
    return train_plain(init, lambda params, batch: losses_of(params, batch).mean(), optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])
