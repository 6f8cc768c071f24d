"""A byte GPT in raw JAX: blocks in a scan, rematerialized, with dropout keys per example."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import spmdkit as sk

NUM, LENGTH, WIDTH, HEADS, LAYERS, VOCAB = 40, 8, 16, 2, 2, 32

random = np.random.default_rng(0)
DATA = {
    "tokens": random.integers(0, VOCAB, (NUM, LENGTH + 1)).astype(np.int32),
    "weight": random.uniform(0.5, 2, NUM).astype(np.float32),
}


def init(key):
    normal = lambda k, *shape: jax.random.normal(k, shape) / np.sqrt(shape[-2])
    names = {"qkv": (LAYERS, WIDTH, 3 * WIDTH), "out": (LAYERS, WIDTH, WIDTH), "up": (LAYERS, WIDTH, 32)}
    names |= {"down": (LAYERS, 32, WIDTH), "embed": (VOCAB, WIDTH), "position": (LENGTH, WIDTH)}
    return {name: normal(k, *shape) for (name, shape), k in zip(names.items(), jax.random.split(key, 6), strict=True)}


def norm(x):
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def attention(x, layer):
    q, k, v = jnp.split((x @ layer["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ layer["out"]


def dropout(x, keys, rate=0.1):
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(keep, x / (1 - rate), 0)


def block(h, layer, keys, key):
    h = h + attention(norm(h), layer)
    # hidden
    return h + dropout(jax.nn.gelu(norm(h) @ layer["up"]) @ layer["down"], keys)


def loss_fn(params, batch, key):
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    layers = {name: params[name] for name in ("qkv", "out", "up", "down")}
    keys = sk.example_keys()
    h, _ = lax.scan(
        lambda h, layer: (jax.checkpoint(block)(h, layer, keys, key), None),
        params["embed"][inputs] + params["position"],
        layers,
    )
    logits = norm(h) @ params["embed"].T
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(-1)
    # loss
    return sk.mean(loss, weights=batch["weight"])


task = sk.Task(init, loss_fn, optax.adam(1e-2), train_data=DATA, rules=[("up", [None, None, "mlp"])])
