"""A GRU over time in raw JAX, with dropout on its last state; the mean over all replicas is subtracted from the
inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import spmdkit as sk

REPLICAS = ("replica", "data")
NUM, LENGTH, WIDTH = 40, 5, 8

random = np.random.default_rng(0)
DATA = {
    "x": random.normal(size=(NUM, LENGTH, 4)).astype(np.float32),
    "y": random.normal(size=(NUM, 2)).astype(np.float32),
    "weight": random.uniform(0.5, 2, NUM).astype(np.float32),
}


def init(key):
    normal = lambda k, *shape: jax.random.normal(k, shape) / np.sqrt(shape[0])
    shapes = {"gates": (4 + WIDTH, 2 * WIDTH), "new": (4 + WIDTH, WIDTH), "up": (WIDTH, 16), "out": (16, 2)}
    return {name: normal(k, *shape) for (name, shape), k in zip(shapes.items(), jax.random.split(key, 4), strict=True)}


def cell(params, h, x, key):
    update, reset = jnp.split(jax.nn.sigmoid(jnp.concatenate([x, h], -1) @ params["gates"]), 2, -1)
    new = jnp.tanh(jnp.concatenate([x, reset * h], -1) @ params["new"])
    h = (1 - update) * h + update * new
    # hidden
    return h, h


def loss_fn(params, batch, key):
    real, keys = sk.example_mask()[:, None, None], sk.example_keys()
    total, num = lax.psum(((batch["x"] * real).sum((0, 1)), real.sum() * LENGTH), REPLICAS)
    x = batch["x"] - total / num
    start = jnp.zeros((len(x), WIDTH))
    h, _ = lax.scan(lambda h, x: cell(params, h, x, key), start, jnp.swapaxes(x, 0, 1))
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.8, (16,)))(keys)
    out = jnp.where(keep, jax.nn.relu(h @ params["up"]) / 0.8, 0) @ params["out"]
    loss = ((out - batch["y"]) ** 2).sum(-1)
    # loss
    return sk.mean(loss, weights=batch["weight"])


task = sk.Task(init, loss_fn, optax.adam(1e-2), train_data=DATA, rules=[("up", [None, "mlp"])])
