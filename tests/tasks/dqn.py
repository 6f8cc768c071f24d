"""DQN: a target network that is copied now and then, in the model state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import batches

# ---- shared ----------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = {
    "s": random.normal(size=(64, 6)).astype(np.float32),
    "a": random.integers(0, 3, 64).astype(np.int32),
    "r": random.normal(size=64).astype(np.float32),
    "next": random.normal(size=(64, 6)).astype(np.float32),
}


def net(key):
    k1, k2 = jax.random.split(key)
    return {"up": jax.random.normal(k1, (6, 16)) / 2, "down": jax.random.normal(k2, (16, 3)) / 4}


def q(params, s):
    return jax.nn.relu(s @ params["up"]) @ params["down"]


def losses_of(params, target, batch):
    chosen = jnp.take_along_axis(q(params, batch["s"]), batch["a"][:, None], -1)[:, 0]
    return optax.huber_loss(chosen, batch["r"] + 0.9 * q(target, batch["next"]).max(-1))


def copied(target, params, num):
    return jax.tree.map(lambda t, p: jnp.where(num % 2 == 1, p, t), target, params)


optimizer = optax.sgd(0.2)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


@jax.jit
def plain_step(params, target, opt_state, batch, num):
    loss, grads = jax.value_and_grad(lambda params: losses_of(params, target, batch).mean())(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), copied(target, params, num), opt_state, loss


def plain():
    params, losses = net(jax.random.key(0)), []
    target, opt_state = params, optimizer.init(params)
    for num, batch in enumerate(batches(DATA)):
        params, target, opt_state, loss = plain_step(params, target, opt_state, batch, num)
        losses.append(loss)
    return losses, params, opt_state


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def init(key):
    params = net(key)
    return sk.Variables(params, {"target": jax.tree.map(jnp.copy, params), "num": jnp.int32(0)})


def loss_fn(params, state, batch, key):
    target, num = copied(state["target"], params, state["num"]), state["num"] + 1
    return sk.mean(losses_of(params, state["target"], batch)), {}, {"target": target, "num": num}


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[(".*up", [None, "mlp"])])
