"""A CNN in flax linen: batch norm over all replicas without padding, dropout, running averages in the model state."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import spmdkit as sk

REPLICAS = ("replica", "data")
NUM = 40

random = np.random.default_rng(0)
DATA = {
    "image": random.normal(size=(NUM, 6, 6, 1)).astype(np.float32),
    "label": random.integers(0, 4, NUM).astype(np.int32),
    "weight": random.uniform(0.5, 2, NUM).astype(np.float32),
}


class BatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x, real):
        where = real[:, None, None, None]
        num = jnp.maximum(lax.psum(where.sum() * x[0, ..., 0].size, REPLICAS), 1)
        mean = lax.psum((x * where).sum((0, 1, 2)), REPLICAS) / num
        var = lax.psum(((x - mean) ** 2 * where).sum((0, 1, 2)), REPLICAS) / num
        running = self.variable("batch_stats", "mean", lambda: jnp.zeros(x.shape[-1]))
        running.value = 0.9 * running.value + 0.1 * mean
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return scale * (x - mean) / jnp.sqrt(var + 1e-3)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x, real, keys, key):
        h = nn.Conv(8, (3, 3))(x)
        # hidden
        h = nn.avg_pool(nn.relu(BatchNorm()(h, real)), (2, 2), strides=(2, 2))
        h = nn.relu(nn.Conv(8, (3, 3))(h)).mean((1, 2))
        h = jax.vmap(lambda k, row: jnp.where(jax.random.bernoulli(k, 0.9, row.shape), row / 0.9, 0))(keys, h)
        return nn.Dense(4)(h)


model = CNN()


def init(key):
    random = np.random.default_rng(1)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape) / 3, jnp.float32)
    conv = lambda *shape: {"kernel": normal(*shape), "bias": normal(shape[-1])}
    params = {"Conv_0": conv(3, 3, 1, 8), "Conv_1": conv(3, 3, 8, 8), "Dense_0": conv(8, 4)}
    return sk.Variables(params | {"BatchNorm_0": {"scale": jnp.ones(8)}}, {"BatchNorm_0": {"mean": jnp.zeros(8)}})


def loss_fn(params, state, batch, key):
    variables, real = {"params": params, "batch_stats": state}, sk.example_mask()
    logits, new = model.apply(variables, batch["image"], real, sk.example_keys(), key, mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    # loss
    return sk.mean(loss, weights=batch["weight"]), {}, new["batch_stats"]


task = sk.Task(init, loss_fn, optax.adam(1e-2), train_data=DATA, rules=[("Dense_0/kernel", ["mlp", None])])
