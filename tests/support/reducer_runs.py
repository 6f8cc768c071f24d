"""A task for tests of reducers: parameters that stand still, an optimizer that adds up what it is given, batches of 64
and of 3 rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.core_runs import program_of

NUM_VALUES = 128 * 128
"""Of the large leaf: a multiple of what any buffer here is filled up to, so that formulas of bytes are met exactly."""

MESHES = {
    "data 8": {"mesh": {"data": 8}},
    "replica 2 x data 4": {"mesh": {"replica": 2, "data": 4}},
    "replica 2 x fsdp 2 x tensor 2": {"mesh": {"replica": 2, "fsdp": 2, "tensor": 2}},
    "fsdp 8 zero 1": {"mesh": {"fsdp": 8}, "layout": {"zero": 1}},
    "data 2 x fsdp 4 zero 2": {"mesh": {"data": 2, "fsdp": 4}, "layout": {"zero": 2}},
}


def adding():
    """Returns an optimizer that moves nothing; its state is the sum of all gradients."""
    return optax.GradientTransformation(
        init=lambda params: jax.tree.map(jnp.zeros_like, params),
        update=lambda g, total, params=None: (jax.tree.map(jnp.zeros_like, g), jax.tree.map(jnp.add, total, g)),
    )


def loss_fn(params, batch, key):
    h = jnp.tanh(sk.shard(batch["x"] @ params["up"], "batch", "mlp"))
    error = h @ params["down"] + params["bias"] - batch["y"]
    return sk.mean((error**2).sum(-1), weights=batch["weight"]), {"size": sk.mean(jnp.abs(error).sum(-1))}


@functools.cache
def data(num):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(num, 128)), random.normal(size=(num, 8))
    weight = random.uniform(0.5, 2, size=num)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32), "weight": weight.astype(np.float32)}


def task(optimizer=None, num=67, **changes):
    def init(key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (128, 128)) / 12,
            "down": jax.random.normal(down, (128, 8)) / 12,
            "bias": jnp.zeros(8),
        }

    given = {"loss_fn": loss_fn, "rules": [("up", ["embed", "mlp"]), ("down", ["mlp", None])]} | changes
    given = {"init": init} | given
    return sk.Task(optimizer=optimizer or adding(), train_data=data(num), **given)


def program(mesh, reducer="sum", own=None, **settings):
    """Returns the program of a task on one of MESHES (or a mapping of settings)."""
    chosen = MESHES[mesh] if isinstance(mesh, str) else mesh
    settings = {"batch_size": 64, "steps": 20, "data": {"drop_remainder": False}} | settings
    return program_of(own or task(), reducer=reducer, **settings, **chosen)


def train(program, steps=20, state=None, start=1):
    """Returns (state, losses) after some steps."""
    state, losses = program.init() if state is None else state, []
    for _, batch in program.batches(start, start + steps - 1):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def owed(state):
    """Returns the sum over replicas of what each owes: a tree like the parameters, of numpy arrays. Of the first call
    of a step."""
    is_state = lambda x: isinstance(x, dict) and set(x) <= {"error", "product"}
    total = lambda x: np.asarray(x["error"], np.float64).sum(0) if x else 0.0
    return jax.tree.map(total, jax.device_get(state.reducer[0]), is_leaf=is_state)


@functools.cache
def true_sum(mesh):
    """Returns the sum of 20 exact gradients."""
    return jax.device_get(train(program(mesh))[0].opt_state)


def applied_and_owed(mesh, reducer):
    """Returns what 20 steps have applied together with what is owed after them."""
    state, _ = train(program(mesh, reducer))
    return jax.tree.map(lambda x, y: np.asarray(x, np.float64) + y, jax.device_get(state.opt_state), owed(state))
