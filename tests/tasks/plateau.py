"""An optimizer that lowers its rate where the loss stands still."""

import optax

import spmdkit as sk
from tests.support.tasks import train_plain
from tests.tasks.classifier import DATA, init, losses_of

# ---- shared ----------------------------------------------------------------------------------------------------------

optimizer = optax.chain(
    optax.sgd(0.5), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5, accumulation_size=1)
)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain():
    return train_plain(init, lambda params, batch: losses_of(params, batch).mean(), optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])
