"""SimCLR with an encoder in equinox: each view is matched with all views of the batch, without padding."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk

NUM = 40

random = np.random.default_rng(0)
DATA = {
    "x": random.normal(size=(NUM, 12)).astype(np.float32),
    "weight": random.uniform(0.5, 2, NUM).astype(np.float32),
}
arrays, static = eqx.partition(eqx.nn.MLP(12, 16, 16, 1, jax.nn.gelu, key=jax.random.key(0)), eqx.is_array)


def embed(params, x, key):
    h = jax.vmap(eqx.combine(params["encoder"], static))(x)
    # hidden
    z = jnp.tanh(h) @ params["head"]
    return z / jnp.linalg.norm(z + 1e-6, axis=-1, keepdims=True)


def views(x, keys):
    noise = jax.vmap(lambda k: jax.random.normal(k, (2, 12)))(keys)
    return x + 0.1 * noise[:, 0], x + 0.1 * noise[:, 1]


def loss_fn(params, batch, key):
    a, b = (embed(params, x, key) for x in views(batch["x"], sk.example_keys()))
    others, real = sk.all_gather(b, with_mask=True)
    similarity = jnp.where(real, 5 * a @ others.T, -jnp.inf)
    positives = sk.replica_index() * len(a) + jnp.arange(len(a))
    loss = optax.softmax_cross_entropy_with_integer_labels(similarity, positives)
    # loss
    return sk.mean(loss, weights=batch["weight"])


def init(key):
    return {"encoder": arrays, "head": jax.random.normal(key, (16, 8)) / 4}


task = sk.Task(init, loss_fn, optax.adam(1e-2), train_data=DATA, rules=[("head", ["mlp", None])])
