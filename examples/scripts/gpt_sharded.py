"""A script as in midGPT or a nanoGPT in JAX: a mesh, sharded arrays, random windows of a text, a step with donation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

STEPS, BATCH, BLOCK, WIDTH, VOCAB = 30, 8, 16, 32, 64
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


def init(key):
    keys = jax.random.split(key, 4)
    return {
        "embed": jax.random.normal(keys[0], (VOCAB, WIDTH)) * 0.02,
        "qkv": jax.random.normal(keys[1], (WIDTH, 3 * WIDTH)) * WIDTH**-0.5,
        "up": jax.random.normal(keys[2], (WIDTH, 4 * WIDTH)) * WIDTH**-0.5,
        "down": jax.random.normal(keys[3], (4 * WIDTH, WIDTH)) * WIDTH**-0.5,
    }


def forward(params, tokens, key):
    x = params["embed"][tokens]
    q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
    x = x + jax.nn.dot_product_attention(q[:, :, None], k[:, :, None], v[:, :, None], is_causal=True)[:, :, 0]
    h = jax.nn.gelu(x @ params["up"]) @ params["down"]
    x = x + jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0)
    return x @ params["embed"].T


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(params, opt_state, x, y, key):
    loss_fn = lambda p: optax.softmax_cross_entropy_with_integer_labels(forward(p, x, key), y).mean()
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def get_batch(data, rng):
    starts = rng.integers(0, len(data) - BLOCK - 1, BATCH)
    windows = np.stack([data[i : i + BLOCK + 1] for i in starts])
    return windows[:, :-1], windows[:, 1:]


def main(num_devices=None):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:num_devices]), ("dp",)), PartitionSpec("dp"))
    shard_batch = functools.partial(jax.device_put, device=sharding)
    params = jax.device_put(init(jax.random.key(0)), sharding)
    opt_state = jax.jit(OPTIMIZER.init)(params)
    data = np.random.default_rng(0).integers(0, VOCAB, 4096, dtype=np.int32).cumsum(dtype=np.int32) % VOCAB
    rng, key = np.random.default_rng(1), jax.random.key(1)
    for itr in range(STEPS):
        x, y = get_batch(data, rng)
        key, step_key = jax.random.split(key)
        params, opt_state, loss = step(params, opt_state, shard_batch(x), shard_batch(y), step_key)
        if itr % 10 == 0:
            print(f"iter {itr}: loss {loss:.4f}")
    return params, opt_state


if __name__ == "__main__":
    main()
