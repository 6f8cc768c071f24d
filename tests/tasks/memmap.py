"""Data in a file that does not fit into memory: windows of a memory-mapped array of tokens."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.tasks import train_plain

# ---- shared ----------------------------------------------------------------------------------------------------------

random = np.random.default_rng(0)
FILE = Path(tempfile.mkdtemp()) / "tokens.bin"
random.integers(0, 11, 64 * 6 + 1).astype(np.uint16).tofile(FILE)
TOKENS = np.memmap(FILE, np.uint16, "r")


def init(key):
    k1, k2 = jax.random.split(key)
    return {"embed": jax.random.normal(k1, (11, 16)), "head": jax.random.normal(k2, (16, 11)) / 4}


def losses_of(params, tokens):
    x = jnp.cumsum(params["embed"][tokens[:, :-1]], 1) / jnp.arange(1, 7)[:, None]
    return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x) @ params["head"], tokens[:, 1:])


optimizer = optax.adam(1e-2)


# ---- plain JAX, one device -------------------------------------------------------------------------------------------

DATA = np.stack([TOKENS[i * 6 : i * 6 + 7] for i in range(64)]).astype(np.int32)


def plain():
    return train_plain(init, lambda params, batch: losses_of(params, batch).mean(), optimizer, DATA)


# ---- spmdkit ---------------------------------------------------------------------------------------------------------


class Windows:
    def __len__(self):
        return (len(TOKENS) - 1) // 6

    def __getitem__(self, i):
        return TOKENS[i * 6 : i * 6 + 7].astype(np.int32)


def loss_fn(params, batch, key):
    return sk.mean(losses_of(params, batch))


task = sk.Task(init, loss_fn, optimizer, train_data=Windows(), rules=[("embed", [None, "mlp"])])
