"""SimCLR: each view finds the other one among all views of the whole batch, its own left out."""

import jax
import jax.numpy as jnp
import optax

import spmdkit as sk
from tests.support.tasks import example_keys, train_plain
from tests.tasks.classifier import DATA

# ---- shared ----------------------------------------------------------------------------------------------------------


def init(key):
    k1, k2 = jax.random.split(key)
    return {"up": jax.random.normal(k1, (12, 16)) / 3, "down": jax.random.normal(k2, (16, 6)) / 4}


def embed(params, x):
    z = jax.nn.relu(x @ params["up"]) @ params["down"]
    return z / jnp.linalg.norm(z + 1e-6, axis=-1, keepdims=True)


def views(x, keys):
    noise = jax.vmap(lambda k: jax.random.normal(k, (2, 12)))(keys)
    return x + 0.1 * noise[:, 0], x + 0.1 * noise[:, 1]


optimizer = optax.adam(1e-2)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def losses_of(params, batch, keys):
    a, b = (embed(params, x) for x in views(batch["x"], keys))
    z = jnp.concatenate([a, b])
    similarity = jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, 5 * z @ z.T)
    others = jnp.roll(jnp.arange(len(z)), len(a))
    return optax.softmax_cross_entropy_with_integer_labels(similarity, others)


def plain():
    loss_of = lambda params, batch, keys: losses_of(params, batch, keys).mean()
    return train_plain(init, loss_of, optimizer, DATA, keys_of=example_keys)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    a, b = (embed(params, x) for x in views(batch["x"], sk.example_keys()))
    all_a, all_b = sk.all_gather((a, b))
    own, ce = sk.replica_index() * len(a) + jnp.arange(len(a)), optax.softmax_cross_entropy_with_integer_labels
    itself = own[:, None] == jnp.arange(len(all_a))

    def find(x, others, same):
        similarity = [5 * x @ others.T, jnp.where(itself, -jnp.inf, 5 * x @ same.T)]
        return ce(jnp.concatenate(similarity, -1), own)

    return sk.mean((find(a, all_b, all_a) + find(b, all_a, all_b)) / 2)


task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=[("up", [None, "mlp"])])
