"""BYOL with the toolkit's average of the parameters as its teacher."""

import jax
import jax.numpy as jnp
import optax

import spmdkit as sk
from tests.support.tasks import batches
from tests.tasks.classifier import DATA

# ---- shared ----------------------------------------------------------------------------------------------------------


def init(key):
    k1, k2 = jax.random.split(key)
    return {"w1": jax.random.normal(k1, (12, 16)) / 3, "w2": jax.random.normal(k2, (16, 6)) / 4}


def embed(net, x):
    z = jax.nn.relu(x @ net["w1"]) @ net["w2"]
    return z / jnp.linalg.norm(z + 1e-6, axis=-1, keepdims=True)


def losses_of(student, teacher, batch):
    return ((embed(student, batch["x"]) - embed(teacher, batch["x"][:, ::-1])) ** 2).sum(-1)


optimizer = optax.sgd(0.2, momentum=0.9)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


@jax.jit
def plain_step(params, teacher, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda params: losses_of(params, teacher, batch).mean())(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, teacher, params), opt_state, loss


def plain():
    params, losses = init(jax.random.key(0)), []
    teacher, opt_state = params, optimizer.init(params)
    for batch in batches(DATA):
        params, teacher, opt_state, loss = plain_step(params, teacher, opt_state, batch)
        losses.append(loss)
    return losses, params, opt_state


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def train_step(state, batch):
    loss_fn = lambda params, batch, key: sk.mean(losses_of(params, state.ema, batch))
    (loss, _), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
    return state.apply_gradients(grads), {"loss": loss}


task = sk.Task(init, train_step=train_step, optimizer=optimizer, train_data=DATA, rules=[("w1", [None, "mlp"])])


# ---- checks ----------------------------------------------------------------------------------------------------------

SETTINGS = {"ema": 0.9}
