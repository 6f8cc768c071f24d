"""A residual MLP in equinox with `filter_shard` in a `filter_jit` step: the structure of its parallelism guide."""

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import spmdkit as sk

WIDTH, HIDDEN, CLASSES, LAYERS = 8, 16, 4, 2
BATCH_SIZE, NUM_STEPS = 16, 5

mesh = Mesh(np.array(jax.devices()), ("batch",))
data_sharding, model_sharding = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        up_key, down_key = jax.random.split(key)
        self.up = eqx.nn.Linear(WIDTH, HIDDEN, key=up_key)
        self.down = eqx.nn.Linear(HIDDEN, WIDTH, key=down_key)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


class Classifier(eqx.Module):
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        *keys, head_key = jax.random.split(key, LAYERS + 1)
        self.blocks = [Block(key) for key in keys]
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=head_key)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


optim = optax.adamw(1e-2)


def init(key):
    model = Classifier(key)
    return model, optim.init(eqx.filter(model, eqx.is_inexact_array))


def compute_loss(model, x, y):
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@eqx.filter_jit(donate="all")
def train_step(model, opt_state, x, y):
    model, opt_state = eqx.filter_shard((model, opt_state), model_sharding)
    x, y = eqx.filter_shard((x, y), data_sharding)
    loss, grads = eqx.filter_value_and_grad(compute_loss)(model, x, y)
    updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    model = eqx.apply_updates(model, updates)
    model, opt_state = eqx.filter_shard((model, opt_state), model_sharding)
    return model, opt_state, loss


def load_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_STEPS * BATCH_SIZE, WIDTH)).astype(np.float32)
    return x, rng.integers(CLASSES, size=len(x)).astype(np.int32)


def step(state, batch):
    model, opt_state, loss = train_step(*state, *batch)
    return (model, opt_state), {"loss": loss}


task = sk.Task(init, train_step=step, state=sk.StateView("0", "1"), train_data=load_data())
