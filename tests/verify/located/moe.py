"""A mixture of experts in raw JAX: a router, a weighted sum over the experts, and a load-balancing loss over the
whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import spmdkit as sk

REPLICAS = ("replica", "data")
NUM, WIDTH, EXPERTS = 40, 8, 4

random = np.random.default_rng(0)
DATA = {
    "x": random.normal(size=(NUM, 6, WIDTH)).astype(np.float32),
    "y": random.normal(size=(NUM, WIDTH)).astype(np.float32),
    "weight": random.uniform(0.5, 2, NUM).astype(np.float32),
}


def init(key):
    normal = lambda k, *shape: jax.random.normal(k, shape) / np.sqrt(shape[-2])
    shapes = {
        "embed": (WIDTH, WIDTH),
        "router": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, 16),
        "down": (EXPERTS, 16, WIDTH),
    }
    return {name: normal(k, *shape) for (name, shape), k in zip(shapes.items(), jax.random.split(key, 4), strict=True)}


def route(h, router):
    probs = jax.nn.softmax(h @ router)
    chosen = jax.nn.one_hot(probs.argmax(-1), EXPERTS)
    real = sk.example_mask()[:, None, None]
    count = lax.psum(real.sum() * h.shape[1], REPLICAS)
    share, importance = (lax.psum((x * real).sum((0, 1)), REPLICAS) / count for x in (chosen, probs))
    return (chosen * probs), EXPERTS * (share * importance).sum()


def experts(h, weights, params):
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->btef", h, params["up"]))
    return jnp.einsum("btef,efd,bte->btd", hidden, params["down"], weights)


def loss_fn(params, batch, key):
    keys = sk.example_keys()
    h = jnp.tanh(batch["x"] @ params["embed"])
    # hidden
    h = h + 0.05 * jax.vmap(lambda k: jax.random.normal(k, h.shape[1:]))(keys)
    weights, balance = route(h, params["router"])
    out = h + experts(h, weights, params)
    loss = ((out.mean(1) - batch["y"]) ** 2).sum(-1) + 0.1 * balance
    # loss
    return sk.mean(loss, weights=batch["weight"])


task = sk.Task(init, loss_fn, optax.adam(1e-2), train_data=DATA, rules=[("up", [None, None, "mlp"])])
