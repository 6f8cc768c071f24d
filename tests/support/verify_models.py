"""Typical models of users, with parameters that have only rounding noise as gradient: key biases, biases before a batch
norm."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from spmdkit.verify.runner import CaseRunner
from spmdkit.verify.task_runner import TaskRunner

VOCAB, WIDTH, HEADS, LENGTH, NUM = 13, 8, 2, 6, 96


def _tokens():
    return {"tokens": np.random.default_rng(0).integers(0, VOCAB, (NUM, LENGTH + 1)).astype(np.int32)}


# ---- GPT-2, from scratch


def gpt2(optimizer):
    """Returns the task of a transformer with biases on queries, keys and values. The key bias cancels in the
    softmax."""

    def init(key):
        keys = iter(jax.random.split(key, 8))
        normal = lambda *shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[0])
        block = {"qkv": normal(WIDTH, 3 * WIDTH), "qkv_bias": jnp.zeros(3 * WIDTH), "out": normal(WIDTH, WIDTH)}
        return {"embed": normal(VOCAB, WIDTH), "layer0": block, "head": normal(WIDTH, VOCAB)}

    def loss_fn(params, batch, key):
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        x = params["embed"][tokens]
        block = params["layer0"]
        qkv = (x @ block["qkv"] + block["qkv_bias"]).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        causal = np.tril(np.ones((LENGTH, LENGTH), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ block["out"]
        loss = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], targets)
        return sk.mean(loss.mean(-1))

    return sk.Task(init, loss_fn, optimizer, train_data=_tokens())


# ---- a CNN with flax


class CNN(nn.Module):
    """Two convolutions with biases, each before a batch norm."""

    dtype: type | None = None

    @nn.compact
    def __call__(self, x, train):
        for width in (4, 8):
            x = nn.Conv(width, (3, 3), dtype=self.dtype)(x)
            norm = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=("replica", "data"))
            x = nn.relu(norm(x))
            x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(4)(x.reshape(x.shape[0], -1))


def cnn(optimizer, dtype=None):
    """Returns the task of the CNN, with an evaluation that uses the running statistics."""
    model = CNN(dtype)
    random = np.random.default_rng(1)
    data = {
        "images": random.normal(size=(NUM, 8, 8, 1)).astype(np.float32),
        "labels": random.integers(0, 4, NUM).astype(np.int32),
    }

    def init(key):
        variables = model.init(key, jnp.zeros((1, 8, 8, 1)), train=False)
        return sk.Variables(variables["params"], {"batch_stats": variables["batch_stats"]})

    def loss_fn(params, state, batch, key):
        logits, new = model.apply({"params": params, **state}, batch["images"], train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return sk.mean(loss), {"accuracy": sk.mean(logits.argmax(-1) == batch["labels"])}, new

    def eval_fn(params, state, batch):
        logits = model.apply({"params": params, **state}, batch["images"], train=False)
        return {"loss": sk.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]))}

    return sk.Task(init, loss_fn, optimizer, train_data=data, eval_data=data, eval_fn=eval_fn)


# ---- attention with equinox


class Block(eqx.Module):
    """An embedding, attention with biases, a layer norm and a head, for one sequence."""

    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
        biases = dict.fromkeys(("use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias"), True)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, **biases, key=keys[1])
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=keys[2])

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        x = x + self.attention(x, x, x, mask=np.tril(np.ones((LENGTH, LENGTH), bool)))
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def equinox_attention(optimizer):
    """Returns the task of the equinox model."""
    shapes = eqx.filter_eval_shape(Block, jax.random.key(0))
    functions = eqx.filter(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct), inverse=True)

    def loss_fn(params, batch, key):
        model = eqx.combine(params, functions)
        logits = jax.vmap(model)(batch["tokens"][:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
        return sk.mean(loss.mean(-1))

    return sk.Task(lambda key: eqx.filter(Block(key), eqx.is_array), loss_fn, optimizer, train_data=_tokens())


MODELS = {"gpt2": gpt2, "flax_cnn": cnn, "equinox": equinox_attention}


def new_case_runner(task, dtype="float32", **settings):
    """Returns the case_runner of a task in this process."""
    return CaseRunner(TaskRunner(sk.Config(task="t.py:t", **settings), task, 16, 3, dtype))


@functools.cache
def case_runner(model, optimizer="adam", rate=1e-3):
    """Returns the case_runner of one of these models. Cached."""
    return new_case_runner(MODELS[model](getattr(optax, optimizer)(rate)))
