"""Collectives that a loss uses for its own sake over ("replica", "data"): contrastive negatives, statistics, sums, in
loops too.

The manual form is traced without types, where the transpose of a sum is a sum: right for a replica's own part of a loss
that is added up.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import spmdkit as sk
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except
from tests.support.natural_runs import BATCH, REPLICAS, STEPS, assert_same_run, by_hand, keep_gradient, train

AXES = ("replica", "data")
DATA = np.random.default_rng(0).normal(size=(BATCH * STEPS, 2, 6)).astype(np.float32)


def init(key):
    names = ["contrastive", "normalised", "looped", "weighted"]
    return {name: normal(seed, 6, 4) / 2 for seed, name in enumerate(names)}


def embed(w, rows):
    z = jnp.tanh(rows @ w)
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def info_nce(w, rows, everybody, own):
    """InfoNCE as in CLIP: the negatives of an example are those of the whole batch."""
    a, b = embed(w, rows[:, 0]), embed(w, rows[:, 1])
    logits = 5 * a @ everybody(b).T
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, own[:, None], -1)[:, 0]


def normalised(w, rows, mean):
    h = rows[:, 0] @ w
    center = mean(h.mean(0))
    scale = mean(((h - center) ** 2).mean(0))
    return (((h - center) / jnp.sqrt(scale + 1e-3) - rows[:, 1, :4]) ** 2).sum(-1)


def looped(w, rows, mean):
    """Statistics of the whole batch in each turn of a scan and in a checkpointed function."""

    @jax.checkpoint
    def turn(h, _):
        h = jnp.tanh(h - mean(h.mean(0)))
        return h, mean((h**2).mean())

    h, energies = lax.scan(turn, rows[:, 0] @ w, length=3)
    return (h**2).sum(-1) * energies.sum()


def weighted(w, rows, total):
    """Weights that are normalised over the whole batch, as a soft attention over examples."""
    scores = jnp.exp(rows[:, 0] @ w[:, 0])
    return (scores / total(scores.sum())) * (rows[:, 1] @ w).sum(-1) * 16


def losses_of(params, rows, everybody, own, mean, total):
    return {
        "contrastive": info_nce(params["contrastive"], rows, everybody, own),
        "normalised": normalised(params["normalised"], rows, mean),
        "looped": looped(params["looped"], rows, mean),
        "weighted": weighted(params["weighted"], rows, total),
    }


def loss_fn(params, rows, key):
    num = rows.shape[0]
    index = lax.axis_index("replica") * lax.axis_size("data") + lax.axis_index("data")
    # One axis after the other: over both at once JAX's vmap has no rule (0.10.2: "Please open a feature request!").
    everybody = lambda x: lax.all_gather(lax.all_gather(x, "data", tiled=True), "replica", tiled=True)
    own = index * num + jnp.arange(num, dtype=jnp.int32)
    losses = losses_of(params, rows, everybody, own, lambda x: lax.pmean(x, AXES), lambda x: lax.psum(x, AXES))
    return sk.mean(sum(losses.values())), {name: sk.mean(x) for name, x in losses.items()}


def plain(params, rows):
    same = lambda x: x
    losses = losses_of(params, rows, same, jnp.arange(BATCH), same, same)
    return sum(losses.values()).mean(), {name: x.mean() for name, x in losses.items()}


@pytest.mark.parametrize("mesh", slow_except(["replica 2 x data 4"], [*REPLICAS[:3], "fsdp 8 zero 2"]))
def test_loss_with_own_collectives_equals_one_device(mesh):
    task = sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.1)), train_data=DATA)
    _, run = train(task, mesh)
    assert_same_run(run, by_hand(plain, jax.jit(init)(jax.random.key(0)), DATA, optax.sgd(0.1)))
