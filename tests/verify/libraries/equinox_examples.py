"""Models of equinox's own examples (a GRU on spirals, batch norm with state, a frozen layer), small, as tasks: the
arrays of a module are trained, a module is written for one example."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax import lax

import spmdkit as sk

NUM = 48
random = np.random.default_rng(0)
IMAGES = {
    "x": random.normal(size=(NUM, 1, 8, 8)).astype(np.float32),
    "y": random.integers(0, 4, NUM).astype(np.int32),
}
SPIRALS = {
    "x": random.normal(size=(NUM, 6, 2)).astype(np.float32),
    "y": random.integers(0, 2, NUM).astype(np.float32),
}


def trained(module, loss_of, optimizer, data, **rest):
    """Returns the task of a module's arrays, `loss_of(model, batch)` the losses of the examples."""
    arrays, static = eqx.partition(module, eqx.is_inexact_array)

    def loss_fn(params, batch, key):
        return sk.mean(loss_of(eqx.combine(params, static), batch))

    return sk.Task(lambda key: arrays, loss_fn, optimizer, train_data=data, **rest)


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


class RNN(eqx.Module):
    hidden_size: int
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, in_size, out_size, hidden_size, *, key):
        ckey, lkey = jr.split(key)
        self.hidden_size = hidden_size
        self.cell = eqx.nn.GRUCell(in_size, hidden_size, key=ckey)
        self.linear = eqx.nn.Linear(hidden_size, out_size, use_bias=False, key=lkey)
        self.bias = jnp.zeros(out_size)

    def __call__(self, input):
        out, _ = lax.scan(lambda carry, x: (self.cell(x, carry), None), jnp.zeros((self.hidden_size,)), input)
        return jax.nn.sigmoid(self.linear(out) + self.bias)


def rnn():
    def losses(model, batch):
        pred = jax.vmap(model)(batch["x"])[:, 0]
        return -(batch["y"] * jnp.log(pred) + (1 - batch["y"]) * jnp.log(1 - pred))

    return trained(RNN(2, 1, 8, key=jr.key(5)), losses, optax.adam(3e-3), SPIRALS)


class Normed(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        a, b = jr.split(key)
        self.conv, self.head = eqx.nn.Conv2d(1, 4, kernel_size=3, key=a), eqx.nn.Linear(4, 4, key=b)
        self.norm = eqx.nn.BatchNorm(4, axis_name=("batch", "replica", "data"), mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(self.conv(x), state)
        return self.head(jax.nn.relu(x).mean((1, 2))), state


def batch_norm():
    model, state = eqx.nn.make_with_state(Normed)(jr.key(6))
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    leaves, treedef = jax.tree.flatten(state)

    def loss_fn(params, model_state, batch, key):
        model, state = eqx.combine(params, static), jax.tree.unflatten(treedef, model_state)
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, state = batched(batch["x"], state)
        return sk.mean(cross_entropy(logits, batch["y"])), {}, jax.tree.leaves(state)

    init = lambda key: sk.Variables(arrays, leaves)
    return sk.Task(init, loss_fn, optax.adam(1e-2), train_data=IMAGES)


def frozen_layer():
    model = eqx.nn.MLP(2, 1, 8, 2, key=jr.key(7))
    filter_spec = jax.tree.map(lambda _: False, model)
    last = lambda tree: (tree.layers[-1].weight, tree.layers[-1].bias)
    filter_spec = eqx.tree_at(last, filter_spec, replace=(True, True))
    diff, static = eqx.partition(model, filter_spec)

    def loss_fn(params, batch, key):
        pred = jax.vmap(eqx.combine(params, static))(batch["x"][:, 0])
        return sk.mean((batch["y"] - pred[:, 0]) ** 2)

    return sk.Task(lambda key: diff, loss_fn, optax.sgd(1e-2), train_data=SPIRALS)


ALL = (rnn, batch_norm, frozen_layer)
TASKS = {f.__name__: f for f in ALL}
"""Name -> what makes the task."""
