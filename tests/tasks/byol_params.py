"""BYOL with the teacher among the parameters, moved by hand after each update."""

import jax
import jax.numpy as jnp
import optax

import spmdkit as sk
from tests.support.tasks import batches
from tests.tasks.classifier import DATA

# ---- shared ----------------------------------------------------------------------------------------------------------


def net(key):
    k1, k2 = jax.random.split(key)
    return {"w1": jax.random.normal(k1, (12, 16)) / 3, "w2": jax.random.normal(k2, (16, 6)) / 4}


def init(key):
    student = net(key)
    return {"student": student, "teacher": jax.tree.map(jnp.copy, student), "head": jnp.eye(6)}


def embed(net, x):
    z = jax.nn.relu(x @ net["w1"]) @ net["w2"]
    return z / jnp.linalg.norm(z + 1e-6, axis=-1, keepdims=True)


def losses_of(params, batch):
    teacher = jax.lax.stop_gradient(embed(params["teacher"], batch["x"][:, ::-1]))
    return ((embed(params["student"], batch["x"]) @ params["head"] - teacher) ** 2).sum(-1)


def moved(params):
    move = lambda t, s: 0.9 * t + 0.1 * s
    return params | {"teacher": jax.tree.map(move, params["teacher"], params["student"])}


optimizer = optax.sgd(0.2, momentum=0.9)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


@jax.jit
def plain_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda params: losses_of(params, batch).mean())(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return moved(optax.apply_updates(params, updates)), opt_state, loss


def plain():
    params, losses = init(jax.random.key(0)), []
    opt_state = optimizer.init(params)
    for batch in batches(DATA):
        params, opt_state, loss = plain_step(params, opt_state, batch)
        losses.append(loss)
    return losses, params, opt_state


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def train_step(state, batch):
    loss_fn = lambda params, batch, key: sk.mean(losses_of(params, batch))
    (loss, _), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
    state = state.apply_gradients(grads)
    return state.replace(params=moved(state.params)), {"loss": loss}


task = sk.Task(init, train_step=train_step, optimizer=optimizer, train_data=DATA, rules=[(".*/w1", [None, "mlp"])])
