"""A small GPT in equinox with sharding constraints on a mesh (replica, data): the structure of midGPT."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

VOCAB, LENGTH, WIDTH, HEADS, LAYERS = 16, 8, 16, 2, 2
BATCH_SIZE, MICROBATCHES, NUM_STEPS = 16, 2, 5

per_host = min(2, jax.device_count())
mesh = Mesh(np.array(jax.devices()).reshape(-1, per_host), ("replica", "data"))


def dense(key, shape):
    return jax.random.normal(key, shape) / np.sqrt(shape[0])


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


class Block(eqx.Module):
    qkv: jax.Array
    out: jax.Array
    up: jax.Array
    down: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.qkv, self.out = dense(keys[0], (WIDTH, 3 * WIDTH)), dense(keys[1], (WIDTH, WIDTH))
        self.up, self.down = dense(keys[2], (WIDTH, 4 * WIDTH)), dense(keys[3], (4 * WIDTH, WIDTH))

    def __call__(self, x_TD):
        q_THC, k_THC, v_THC = jnp.split((norm(x_TD) @ self.qkv).reshape(LENGTH, HEADS, -1), 3, axis=-1)
        scores_HTS = jnp.einsum("thc,shc->hts", norm(q_THC), norm(k_THC))
        scores_HTS = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores_HTS, -jnp.inf)
        mixed_THC = jnp.einsum("hts,shc->thc", jax.nn.softmax(scores_HTS), v_THC)
        x_TD = x_TD + mixed_THC.reshape(LENGTH, WIDTH) @ self.out
        return x_TD + jax.nn.gelu(norm(x_TD) @ self.up) @ self.down


class GPT(eqx.Module):
    embed: jax.Array
    blocks: Block
    activation: Callable

    def __init__(self, key):
        embed_key, block_key = jax.random.split(key)
        self.embed = dense(embed_key, (VOCAB, WIDTH))
        self.blocks = jax.vmap(Block)(jax.random.split(block_key, LAYERS))
        self.activation = jnp.tanh

    def __call__(self, x_T):
        x_TD, _ = jax.lax.scan(jax.checkpoint(lambda x, block: (block(x), None)), self.embed[x_T], self.blocks)
        return self.activation(norm(x_TD)) @ self.embed.T


def shard_gpt(model):
    def shard(x):
        spec = P(*(None,) * (x.ndim - 1), "data") if x.size > 256 else P()
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    arrays, static = eqx.partition(model, eqx.is_array)
    return eqx.combine(jax.tree.map(shard, arrays), static)


def init_model(key):
    return shard_gpt(GPT(key))


def loss_fn(params, static, x_BT, y_BT):
    model = eqx.combine(params, static)
    x_BT = jax.lax.with_sharding_constraint(x_BT, NamedSharding(mesh, P(("replica", "data"))))
    logits_BTV = jax.vmap(model)(x_BT)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, y_BT).mean()


optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(b2=0.95),
    optax.scale_by_schedule(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, NUM_STEPS)),
    optax.scale(-1),
)


@eqx.filter_jit(donate="all")
def step(model, opt_state, x_GBT, y_GBT):
    params, static = eqx.partition(model, eqx.is_array)

    def microstep(grads_so_far, xy):
        loss, grads = jax.value_and_grad(loss_fn)(params, static, *xy)
        return jax.tree.map(jnp.add, grads_so_far, shard_gpt(grads)), loss

    grads, loss_G = jax.lax.scan(microstep, jax.tree.map(jnp.zeros_like, params), (x_GBT, y_GBT))
    grads = jax.tree.map(lambda g: g / MICROBATCHES, grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return eqx.combine(optax.apply_updates(params, updates), static), opt_state, loss_G.mean()


def load_data():
    tokens = np.random.default_rng(0).integers(VOCAB, size=(NUM_STEPS * BATCH_SIZE, LENGTH + 1)).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def train():
    data = load_data()
    model = eqx.filter_jit(init_model)(jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    rows = NamedSharding(mesh, P(None, ("replica", "data"), None))
    losses = []
    for i in range(NUM_STEPS):
        x_GBT, y_GBT = (
            jax.device_put(x[i * BATCH_SIZE : (i + 1) * BATCH_SIZE].reshape(MICROBATCHES, -1, LENGTH), rows)
            for x in data
        )
        model, opt_state, loss = step(model, opt_state, x_GBT, y_GBT)
        losses.append(float(loss))
    return losses, eqx.filter(model, eqx.is_array)


if __name__ == "__main__":
    train()
