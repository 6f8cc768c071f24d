"""L-BFGS with a line search, which needs the loss as a function of the parameters."""

import optax

import spmdkit as sk
from tests.support.tasks import train_plain
from tests.tasks.classifier import DATA, init, losses_of

# ---- shared ----------------------------------------------------------------------------------------------------------

optimizer = optax.lbfgs(memory_size=3, linesearch=optax.scale_by_backtracking_linesearch(max_backtracking_steps=8))


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain():
    return train_plain(init, lambda params, batch: losses_of(params, batch).mean(), optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])
