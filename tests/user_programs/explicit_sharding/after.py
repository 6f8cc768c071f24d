"""A gated MLP in JAX's explicit sharding mode: shardings are part of the types, as in JAX's documentation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import spmdkit as sk

WIDTH, HIDDEN, CLASSES = 8, 16, 4
BATCH_SIZE, NUM_STEPS = 16, 5


class State(NamedTuple):
    params: Any
    opt_state: Any
    step: Any


tx = optax.adamw(1e-2)


def init(key):
    keys = jax.random.split(key, 3)
    params = {
        "gate": 0.3 * jax.random.normal(keys[0], (WIDTH, HIDDEN), out_sharding=P(None, "tensor")),
        "up": 0.3 * jax.random.normal(keys[1], (WIDTH, HIDDEN), out_sharding=P(None, "tensor")),
        "down": 0.3 * jax.random.normal(keys[2], (HIDDEN, CLASSES), out_sharding=P("tensor", None)),
    }
    return State(params, tx.init(params), jnp.zeros((), jnp.int32))


def forward(params, x):
    gate = jax.nn.silu(jnp.einsum("bd,df->bf", x, params["gate"], out_sharding=P("data", "tensor")))
    up = jnp.einsum("bd,df->bf", x, params["up"], out_sharding=P("data", "tensor"))
    return jnp.einsum("bf,fk->bk", gate * up, params["down"], out_sharding=P("data", None))


def loss_fn(params, batch):
    x = jax.reshard(batch["x"], P("data", None))
    logits = forward(params, x)
    labels = jax.nn.one_hot(jax.reshard(batch["y"], P("data")), CLASSES)
    assert jax.typeof(logits).sharding.spec == jax.typeof(labels).sharding.spec
    return optax.softmax_cross_entropy(logits, labels).mean()


@jax.jit
def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state, state.step + 1), {"loss": loss}


def load_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_STEPS * BATCH_SIZE, WIDTH)).astype(np.float32)
    return {"x": x, "y": rng.integers(CLASSES, size=len(x)).astype(np.int32)}


view = sk.StateView(params="params", opt_state="opt_state", step="step")
task = sk.Task(init, train_step=train_step, state=view, train_data=load_data())
