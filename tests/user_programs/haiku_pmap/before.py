"""A multilayer perceptron of Haiku under pmap over "i": the structure of Haiku's examples."""

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

WIDTH, CLASSES = 8, 4
BATCH_SIZE, NUM_STEPS = 16, 5


class TrainState(NamedTuple):
    params: Any
    opt_state: Any


def net_fn(x):
    return hk.nets.MLP([16, 16, CLASSES])(x)


network = hk.without_apply_rng(hk.transform(net_fn))
optimizer = optax.adam(1e-2)


def initial_state(key):
    params = network.init(key, jnp.zeros((1, WIDTH)))
    return TrainState(params, optimizer.init(params))


def loss_fn(params, batch):
    logits = network.apply(params, batch["image"])
    losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch["label"], CLASSES))
    return losses.mean()


def update(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    grads, loss = lax.pmean((grads, loss), axis_name="i")
    updates, opt_state = optimizer.update(grads, state.opt_state)
    return TrainState(optax.apply_updates(state.params, updates), opt_state), {"loss": loss}


def load_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_STEPS * BATCH_SIZE, WIDTH)).astype(np.float32)
    return {"image": x, "label": rng.integers(CLASSES, size=len(x)).astype(np.int32)}


def train():
    num, data, losses = jax.local_device_count(), load_data(), []
    state = jax.tree.map(lambda x: jnp.stack([x] * num), initial_state(jax.random.key(0)))
    p_update = jax.pmap(update, axis_name="i", donate_argnums=0)
    for i in range(NUM_STEPS):
        batch = {name: x[i * BATCH_SIZE : (i + 1) * BATCH_SIZE] for name, x in data.items()}
        state, metrics = p_update(state, {name: x.reshape(num, -1, *x.shape[1:]) for name, x in batch.items()})
        losses.append(float(metrics["loss"][0]))
    return losses, jax.tree.map(lambda x: x[0], state.params)


if __name__ == "__main__":
    train()
