"""A language model with its sequence sharded over `context` and custom attention: each device has a shard of the
keys, and all queries."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import spmdkit as sk
from spmdkit.ops.collectives import all_gather, all_reduce, axis_index, axis_size, reduce_scatter  # noqa: F401 - used by a bug

NUM, LENGTH, WIDTH, VOCAB = 40, 8, 16, 32

random = np.random.default_rng(0)
DATA = {
    "tokens": random.integers(0, VOCAB, (NUM, LENGTH)).astype(np.int32),
    "targets": random.integers(0, VOCAB, (NUM, LENGTH)).astype(np.int32),
    "weight": random.uniform(0.5, 2, NUM).astype(np.float32),
}
ROWS = ("batch", "sequence", None)


def init(key):
    normal = lambda k, *shape: jax.random.normal(k, shape) / np.sqrt(shape[0])
    shapes = {"embed": (VOCAB, WIDTH), "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "head": (WIDTH, VOCAB)}
    return {name: normal(k, *shapes[name]) for name, k in zip(shapes, jax.random.split(key, 4), strict=True)}


def attention(x, qkv):
    q, k, v = jnp.split(x @ qkv, 3, -1)
    # sequence
    q = all_gather(q, "sequence", dim=1)
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(x.shape[-1])
    positions = axis_index("sequence") * x.shape[1] + jnp.arange(x.shape[1])
    weights = jnp.where(jnp.arange(LENGTH)[:, None] >= positions, jnp.exp(jnp.tanh(scores)), 0)
    total = all_reduce(weights.sum(-1, keepdims=True), "sequence")
    return reduce_scatter(jnp.einsum("bqk,bkd->bqd", weights / total, v), "sequence", dim=1)


def loss_fn(params, batch, key):
    h = sk.shard(params["embed"][batch["tokens"]], *ROWS)
    h = h + sk.manual(attention, in_dims=[ROWS, (None, None)], out_dims=ROWS)(h, params["qkv"]) @ params["out"]
    # hidden
    h = h * lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-6)
    loss = optax.softmax_cross_entropy_with_integer_labels(h @ params["head"], batch["targets"]).mean(-1)
    # loss
    return sk.mean(loss, weights=batch["weight"])


task = sk.Task(init, loss_fn, optax.adam(1e-2), train_data=DATA)
