"""A small GPT in raw JAX with biases on queries, keys and values, tensor parallel by four rules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import train_plain

# ---- shared ----------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
DATA = random.integers(0, 13, (64, 9)).astype(np.int32)


def init(key):
    k = jax.random.split(key, 6)
    block = {
        "qkv": jax.random.normal(k[1], (16, 3, 2, 8)) / 4,
        "qkv_bias": jnp.zeros((3, 2, 8)),
        "out": jax.random.normal(k[2], (2, 8, 16)) / 4,
        "up": jax.random.normal(k[3], (16, 32)) / 4,
        "down": jax.random.normal(k[4], (32, 16)) / 6,
    }
    return {"embed": jax.random.normal(k[0], (13, 16)), "block": block, "head": jax.random.normal(k[5], (16, 13)) / 4}


def losses_of(params, tokens):
    norm = lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    p, x = params["block"], params["embed"][tokens[:, :-1]]
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", norm(x), p["qkv"]) + p["qkv_bias"], 2, 0)
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / 8**0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    x = x + jnp.einsum("bhts,bshk,hkd->btd", jax.nn.softmax(scores), v, p["out"])
    x = x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
    return optax.softmax_cross_entropy_with_integer_labels(norm(x) @ params["head"], tokens[:, 1:])


# Adam would make signs of the rounding noise that is the gradient of the keys' bias: the softmax does not depend on it.
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.3, momentum=0.9))


# ---- plain JAX, one device -------------------------------------------------------------------------------------------


def plain():
    return train_plain(init, lambda params, batch: losses_of(params, batch).mean(), optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


rules = [
    (".*/qkv", [None, None, "heads", None]),
    (".*/out", ["heads", None, None]),
    (".*/up", [None, "mlp"]),
    (".*/down", ["mlp", None]),
]
task = sk.Task(init, loss_fn, optimizer, train_data=DATA, rules=rules)
