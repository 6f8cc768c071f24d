"""Models of equinox's own examples (a CNN on images, a GRU on spirals, BERT, a vision transformer, a score-based
diffusion, batch norm with state, a frozen layer, a U-Net), small, as tasks: the arrays of a module are trained, a
module is written for one example."""

import functools

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
TOKENS = {
    "tokens": random.integers(1, 13, (NUM, 8)).astype(np.int32),
    "y": random.integers(0, 2, NUM).astype(np.int32),
}


def trained(module, loss_of, optimizer, data, **rest):
    """Returns the task of a module's arrays, `loss_of(model, batch)` the losses of the examples."""
    arrays, static = eqx.partition(module, eqx.is_inexact_array)

    def loss_fn(params, batch, key):
        return sk.mean(loss_of(eqx.combine(params, static), batch))

    return sk.Task(lambda key: arrays, loss_fn, optimizer, train_data=data, **rest)


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


# ---- a CNN on images: examples/mnist
# ------------------------------------------------------------------------------------


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=4, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(48, 16, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.Linear(16, 4, key=keys[2]),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def cnn():
    losses = lambda model, batch: cross_entropy(jax.vmap(model)(batch["x"]), batch["y"])
    return trained(CNN(jr.key(1)), losses, optax.adamw(3e-4), IMAGES)


# ---- a GRU on spirals: examples/train_rnn
# ---------------------------------------------------------------------------------


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


# ---- BERT: examples/bert
# ------------------------------------------------------------------------------------------------


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, width, key):
        a, b, c = jr.split(key, 3)
        biases = {f"use_{which}_bias": True for which in ("query", "key", "value", "output")}
        self.attention = eqx.nn.MultiheadAttention(2, width, dropout_p=0.1, key=a, **biases)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.up, self.down = eqx.nn.Linear(width, 2 * width, key=b), eqx.nn.Linear(2 * width, width, key=c)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, mask, key):
        a, b = jr.split(key)
        x = jax.vmap(self.norms[0])(x + self.attention(x, x, x, mask=mask, key=a))
        h = jax.vmap(lambda row: self.down(jax.nn.gelu(self.up(row))))(x)
        return jax.vmap(self.norms[1])(x + self.dropout(h, key=b))


class Bert(eqx.Module):
    words: eqx.nn.Embedding
    places: eqx.nn.Embedding
    blocks: list
    pooler: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key, width=8):
        keys = jr.split(key, 6)
        self.words, self.places = eqx.nn.Embedding(13, width, key=keys[0]), eqx.nn.Embedding(8, width, key=keys[1])
        self.blocks = [Block(width, key) for key in keys[2:4]]
        self.pooler, self.head = eqx.nn.Linear(width, width, key=keys[4]), eqx.nn.Linear(width, 2, key=keys[5])

    def __call__(self, tokens, key):
        x = jax.vmap(self.words)(tokens) + jax.vmap(self.places)(jnp.arange(len(tokens)))
        mask = jnp.broadcast_to(tokens > 2, (len(tokens), len(tokens)))
        for block, k in zip(self.blocks, jr.split(key, len(self.blocks)), strict=True):
            x = block(x, mask, k)
        return self.head(jax.nn.tanh(self.pooler(x[0])))


def bert():
    def losses(model, batch):
        logits = jax.vmap(model)(batch["tokens"], sk.example_keys())
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    return trained(Bert(jr.key(2)), losses, tx, TOKENS, rules=[(".*/up/weight", ["mlp", None])])


# ---- a vision transformer: examples/vision_transformer
# ----------------------------------------------------------------------


class VisionTransformer(eqx.Module):
    patches: eqx.nn.Linear
    positional: jax.Array
    cls_token: jax.Array
    attention: eqx.nn.MultiheadAttention
    norms: list
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key, width=8):
        keys = jr.split(key, 6)
        self.patches = eqx.nn.Linear(16, width, key=keys[0])
        self.positional, self.cls_token = jr.normal(keys[1], (5, width)), jr.normal(keys[2], (1, width))
        self.attention = eqx.nn.MultiheadAttention(2, width, key=keys[3])
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(3)]
        self.mlp, self.head = eqx.nn.MLP(width, width, 16, 1, key=keys[4]), eqx.nn.Linear(width, 4, key=keys[5])

    def __call__(self, image):
        x = image.reshape(2, 4, 2, 4).transpose(0, 2, 1, 3).reshape(4, 16)
        x = jnp.concatenate([self.cls_token, jax.vmap(self.patches)(x)]) + self.positional
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h)
        x = x + jax.vmap(lambda row: self.mlp(self.norms[1](row)))(x)
        return self.head(self.norms[2](x[0]))


def vision_transformer():
    losses = lambda model, batch: cross_entropy(jax.vmap(model)(batch["x"]), batch["y"])
    tx = optax.adamw(1e-2, b1=0.9, b2=0.999, weight_decay=0.1)
    return trained(VisionTransformer(jr.key(3)), losses, tx, IMAGES)


# ---- score-based diffusion: examples/score_based_diffusion
# -------------------------------------------------------------------


def diffusion():
    model = eqx.nn.MLP(65, 64, 16, 1, jax.nn.tanh, key=jr.key(4))

    def single(model, data, t, key):
        beta = t  # the integral of beta from 0 to t
        mean, var = data * jnp.exp(-0.5 * beta), jnp.maximum(1 - jnp.exp(-beta), 1e-5)
        noise = jr.normal(key, data.shape)
        y = mean + jnp.sqrt(var) * noise
        pred = model(jnp.concatenate([y.ravel(), t[None] / 10])).reshape(data.shape)
        return (1 - jnp.exp(-beta)) * jnp.mean((pred + noise / jnp.sqrt(var)) ** 2)

    def losses(model, batch):
        keys = jax.vmap(jr.split)(sk.example_keys())
        t = jax.vmap(lambda k: jr.uniform(k, minval=0.1, maxval=10.0))(keys[:, 0])
        return jax.vmap(functools.partial(single, model))(batch["x"], t, keys[:, 1])

    return trained(model, losses, optax.adabelief(3e-3), IMAGES)


# ---- batch norm with its state: examples/stateful and the guide to BatchNorm
# ---------------------------------------------------


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


# ---- a frozen layer: examples/frozen_layer
# ---------------------------------------------------------------------------------


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


# ---- a U-Net that denoises: examples/unet
# ----------------------------------------------------------------------------------


class UNet(eqx.Module):
    first: eqx.nn.Conv2d
    down: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    up: eqx.nn.ConvTranspose2d
    last: eqx.nn.Conv2d

    def __init__(self, key):
        keys = jr.split(key, 4)
        self.first = eqx.nn.Conv2d(1, 4, kernel_size=3, padding=1, key=keys[0])
        self.down = eqx.nn.Conv2d(4, 8, kernel_size=3, stride=2, padding=1, key=keys[1])
        self.norm = eqx.nn.GroupNorm(2, 8)
        self.up = eqx.nn.ConvTranspose2d(8, 4, kernel_size=4, stride=2, padding=1, key=keys[2])
        self.last = eqx.nn.Conv2d(8, 1, kernel_size=3, padding=1, key=keys[3])

    def __call__(self, t, y):
        h = jax.nn.silu(self.first(y))
        inner = jax.nn.silu(self.norm(self.down(h)) + t)
        return self.last(jnp.concatenate([h, self.up(inner)]))


def unet():
    def single(model, x, key):
        k1, k2 = jr.split(key)
        t, noise = jr.uniform(k1), jr.normal(k2, x.shape)
        return jnp.mean((model(t, jnp.sqrt(1 - t) * x + jnp.sqrt(t) * noise) - noise) ** 2)

    losses = lambda model, batch: jax.vmap(functools.partial(single, model))(batch["x"], sk.example_keys())
    return trained(UNet(jr.key(8)), losses, optax.adam(3e-3), IMAGES)


ALL = (cnn, rnn, bert, vision_transformer, diffusion, batch_norm, frozen_layer, unet)
TASKS = {f.__name__: f for f in ALL}
"""Name -> what makes the task."""
