"""Losses of natural programs: some are equal on every mesh, the others mix the rows of a replica. The tests of the row
analysis run them, and random combinations of their parts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import spmdkit as sk

ROWS, WIDTH, CLASSES, TOKENS = 16, 6, 5, 4
REPLICAS = ("replica", "data")

_rng = np.random.default_rng(0)
DATA = {
    "x": _rng.normal(size=(2 * ROWS, WIDTH)).astype(np.float32),
    "y": _rng.normal(size=(2 * ROWS, CLASSES)).astype(np.float32),
    "label": _rng.integers(0, CLASSES, 2 * ROWS).astype(np.int32),
    "tokens": _rng.integers(0, CLASSES, (2 * ROWS, TOKENS)).astype(np.int32),
    "length": _rng.integers(1, TOKENS + 1, 2 * ROWS).astype(np.int32),
    "id": np.arange(2 * ROWS, dtype=np.int32),
}


def init(key):
    return {"w": jax.random.normal(key, (WIDTH, CLASSES)) * 0.5, "table": jax.random.normal(key, (CLASSES, CLASSES))}


def logits(params, batch):
    return batch["x"] @ params["w"]


def errors(params, batch):
    return (logits(params, batch) - batch["y"]) ** 2


def cross_entropy(scores, labels):
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


def token_losses(params, batch):
    scores = jnp.take(params["table"], batch["tokens"][:, :-1], axis=0)
    return cross_entropy(scores, batch["tokens"][:, 1:])


def token_mask(batch):
    return jnp.arange(TOKENS - 1) < batch["length"][:, None]


def batch_norm(h):
    return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)


def batch_norm_of_all(h):
    mean, squares = lax.pmean((h.mean(0), (h**2).mean(0)), REPLICAS)
    return (h - mean) / jnp.sqrt(squares - mean**2 + 1e-5)


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def info_nce(params, batch, gather):
    own, other = unit(logits(params, batch)), unit(batch["y"])
    first = sk.replica_index() * len(own) if gather else 0
    others = sk.all_gather(other) if gather else other
    return sk.mean(cross_entropy(own @ others.T / 0.2, first + jnp.arange(len(own))))


def nt_xent(params, batch):
    z = unit(jnp.concatenate([logits(params, batch), batch["y"]]))
    n = len(batch["x"])
    scores = jnp.where(jnp.eye(2 * n, dtype=bool), -1e9, z @ z.T)
    return sk.mean(cross_entropy(scores, jnp.concatenate([jnp.arange(n) + n, jnp.arange(n)])).reshape(2, n).T)


def own_labels(params, batch):
    """InfoNCE over the rows of all replicas without the offset of the replica in the labels."""
    own, other = unit(logits(params, batch)), unit(batch["y"])
    scores = jax.nn.log_softmax(own @ sk.all_gather(other).T / 0.2)
    return sk.mean(-scores[jnp.arange(len(own)), np.arange(len(own))])


def returns(params, batch):
    """Discounted returns, with the rows as the steps of an episode."""
    rewards, values = batch["y"][:, 0], logits(params, batch)[:, 0]
    later = lax.scan(lambda g, r: (r + 0.9 * g, r + 0.9 * g), jnp.float32(0), rewards, reverse=True)[1]
    return sk.mean(-later * values)


def imputed(params, batch):
    x = jnp.where(batch["x"] < -1, batch["x"].mean(0), batch["x"])
    return sk.mean(x @ params["w"])


def vicreg(params, batch):
    z = logits(params, batch)
    centered = z - z.mean(0)
    covariance = centered.T @ centered / len(z)
    return sk.mean(errors(params, batch)) + 0.1 * sk.scalar((covariance**2).sum() - (jnp.diag(covariance) ** 2).sum())


def dice(params, batch):
    p, t = jax.nn.sigmoid(logits(params, batch)), (batch["y"] > 0).astype(jnp.float32)
    return sk.scalar(1 - 2 * (p * t).sum() / (p.sum() + t.sum()))


def switch(params, batch):
    p = jax.nn.softmax(logits(params, batch))
    fraction = jax.nn.one_hot(p.argmax(-1), CLASSES).mean(0)
    return sk.mean(errors(params, batch)) + 0.01 * sk.scalar(CLASSES * (fraction * p.mean(0)).sum())


def advantages(params, batch):
    a = batch["y"][:, 0]
    a = (a - a.mean()) / (a.std() + 1e-8)
    return sk.mean(-a * jax.nn.log_softmax(logits(params, batch))[jnp.arange(len(a)), batch["label"]])


def chunked(params, batch):
    """The mean over tokens, in chunks, to save memory."""
    scores = jnp.take(params["table"], batch["tokens"], axis=0).reshape(4, -1, CLASSES)
    labels = batch["tokens"].reshape(4, -1)
    total, _ = lax.scan(lambda t, c: (t + cross_entropy(*c).sum(), None), jnp.float32(0), (scores, labels))
    return sk.mean(jnp.full(len(batch["x"]), total / batch["tokens"].size))


def looped(params, batch):
    step = lambda total, row: (total + ((row["x"] @ params["w"] - row["y"]) ** 2).mean(), None)
    total, _ = lax.scan(step, jnp.float32(0), {"x": batch["x"], "y": batch["y"]})
    return sk.mean(jnp.full(len(batch["x"]), total / len(batch["x"])))


def recurrent(params, batch):
    def cell(h, token):
        h = jnp.tanh(h @ params["table"] + params["table"][token])
        return h, h

    _, hs = lax.scan(cell, jnp.zeros((len(batch["x"]), CLASSES)), batch["tokens"].T)
    return sk.mean((hs.transpose(1, 0, 2)[:, -1] - batch["y"]) ** 2)


def iterated(params, batch):
    """Newton's method for each row, to convergence."""

    def root(c):
        body = lambda x: x - (x**3 + x - c) / (3 * x**2 + 1)
        return lax.while_loop(lambda x: jnp.abs(x**3 + x - c) > 1e-4, body, c)

    return sk.mean((jax.vmap(root)(lax.stop_gradient(logits(params, batch)[:, 0])) - batch["y"][:, 0]) ** 2)


def preference(params, batch):
    """Two answers for each row in one forward pass, as DPO trainers do."""
    both = jnp.concatenate([batch["x"], batch["x"] ** 2]) @ params["w"]
    n = len(batch["x"])
    return sk.mean(-jax.nn.log_sigmoid((both[:n] - both[n:]).sum(-1)))


def dropout(params, batch, key):
    kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return sk.mean(((kept * batch["x"]) @ params["w"] - batch["y"]) ** 2)


def example_dropout(params, batch, key):
    kept = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (WIDTH,)))(sk.example_keys())
    return sk.mean(((kept * batch["x"]) @ params["w"] - batch["y"]) ** 2)


class Case(NamedTuple):
    """A loss `(params, batch, key)`, and how rows enter it."""

    loss: Callable[..., Any]
    rows: str = "as a mean"


def _keyless(loss, *args):
    return lambda params, batch, key: loss(params, batch, *args)


EQUAL = {
    "mse": Case(lambda p, b, k: sk.mean(errors(p, b))),
    "mean of rows": Case(lambda p, b, k: sk.mean(errors(p, b).mean(-1))),
    "attention": Case(
        lambda p, b, k: sk.mean(jax.nn.dot_product_attention(*[errors(p, b)[:, :, None, None]] * 3).sum((1, 2, 3)))
    ),
    "one number": Case(lambda p, b, k: sk.mean(errors(p, b).mean())),
    "sum over the number": Case(lambda p, b, k: sk.scalar((errors(p, b) / b["x"].shape[0]).sum())),
    "cross entropy": Case(lambda p, b, k: sk.mean(cross_entropy(logits(p, b), b["label"]))),
    "log probability by index": Case(
        lambda p, b, k: sk.mean(-jax.nn.log_softmax(logits(p, b))[jnp.arange(len(b["x"])), b["label"]])
    ),
    "log probability by index of numpy": Case(
        lambda p, b, k: sk.mean(-jax.nn.log_softmax(logits(p, b))[np.arange(len(b["x"])), b["label"]])
    ),
    "tiled": Case(lambda p, b, k: sk.mean((jnp.tile(b["x"], (1, 2)) @ jnp.tile(p["w"], (2, 1)) - b["y"]) ** 2)),
    "one hot": Case(lambda p, b, k: sk.mean(-(jax.nn.one_hot(b["label"], CLASSES) * logits(p, b)).sum(-1))),
    "tokens": Case(lambda p, b, k: sk.mean(token_losses(p, b), where=token_mask(b))),
    "token weights": Case(lambda p, b, k: sk.mean(token_losses(p, b), weights=token_mask(b) * 0.5)),
    "mean of each row's tokens": Case(
        lambda p, b, k: sk.mean((token_losses(p, b) * token_mask(b)).sum(1) / token_mask(b).sum(1).clip(1))
    ),
    "two means": Case(lambda p, b, k: sk.mean(errors(p, b)) + 0.1 * sk.mean(token_losses(p, b), where=token_mask(b))),
    "penalty": Case(lambda p, b, k: sk.mean(errors(p, b)) + 0.1 * (p["w"] ** 2).sum()),
    "mean added to rows": Case(lambda p, b, k: sk.mean(errors(p, b).mean(-1) + 0.1 * (logits(p, b) ** 2).mean())),
    "batch norm of all replicas": Case(lambda p, b, k: sk.mean((batch_norm_of_all(logits(p, b)) - b["y"]) ** 2)),
    "layer norm": Case(lambda p, b, k: sk.mean((jax.nn.standardize(logits(p, b)) - b["y"]) ** 2)),
    "info nce of all replicas": Case(_keyless(info_nce, True)),
    "chunked": Case(_keyless(chunked)),
    "looped": Case(_keyless(looped)),
    "map": Case(
        lambda p, b, k: sk.mean(lax.map(lambda r: ((r[0] @ p["w"] - r[1]) ** 2).mean(), (b["x"], b["y"]), batch_size=2))
    ),
    "vmap": Case(lambda p, b, k: sk.mean(jax.vmap(lambda x, y: ((x @ p["w"] - y) ** 2).sum())(b["x"], b["y"]))),
    "recurrent": Case(_keyless(recurrent)),
    "iterated": Case(_keyless(iterated)),
    "preference": Case(_keyless(preference)),
    "dropout": Case(dropout),
    "dropout by example": Case(example_dropout),
    "solve": Case(lambda p, b, k: sk.mean(jnp.linalg.cholesky(jnp.eye(3) * (1 + b["x"][:, :1, None] ** 2)) ** 2)),
    "fft": Case(lambda p, b, k: sk.mean(jnp.abs(jnp.fft.rfft(b["x"] @ p["w"])))),
    "sorted features": Case(lambda p, b, k: sk.mean((jnp.sort(logits(p, b), -1) - b["y"]) ** 2)),
    "top k": Case(lambda p, b, k: sk.mean(lax.top_k(logits(p, b), 2)[0])),
    "remat": Case(lambda p, b, k: sk.mean(jax.checkpoint(errors)(p, b))),
    "gradient of inputs": Case(
        lambda p, b, k: sk.mean(jax.vmap(jax.grad(lambda x: jnp.tanh(x @ p["w"]).sum()))(b["x"]) ** 2)
    ),
    "constant": Case(lambda p, b, k: sk.scalar((p["w"] ** 2).sum()), "not at all"),
}
"""Losses with the same value on every mesh."""

MIXED = {
    name: Case(loss, "mixed across rows")
    for name, loss in {
        "batch norm": lambda p, b, k: sk.mean((batch_norm(logits(p, b)) - b["y"]) ** 2),
        "info nce": _keyless(info_nce, False),
        "nt xent": _keyless(nt_xent),
        "labels of one replica": _keyless(own_labels),
        "returns": _keyless(returns),
        "missing values": _keyless(imputed),
        "vicreg": _keyless(vicreg),
        "dice": _keyless(dice),
        "rmse": lambda p, b, k: sk.mean(jnp.sqrt(errors(p, b).mean())),
        "switch": _keyless(switch),
        "advantages": _keyless(advantages),
        "mixup": lambda p, b, k: sk.mean(((b["x"] + jnp.roll(b["x"], 1, 0)) @ p["w"] - b["y"]) ** 2),
        "flipped mixup": lambda p, b, k: sk.mean(((b["x"] + b["x"][::-1]) @ p["w"] - b["y"]) ** 2),
        "shuffled": lambda p, b, k: sk.mean((jax.random.permutation(k, b["x"]) @ p["w"] - b["y"]) ** 2),
        "masked by hand": lambda p, b, k: sk.scalar((token_losses(p, b) * token_mask(b)).sum() / token_mask(b).sum()),
        "sum": lambda p, b, k: sk.scalar(errors(p, b).sum()),
        "largest": lambda p, b, k: sk.scalar(errors(p, b).max()),
        "hard examples": lambda p, b, k: sk.mean(jnp.sort(errors(p, b).mean(-1))[-2:]),
        "median": lambda p, b, k: sk.scalar(jnp.median(errors(p, b))),
        "correlation": lambda p, b, k: sk.scalar(-jnp.corrcoef(logits(p, b)[:, 0], b["y"][:, 0])[0, 1]),
        "focal over the batch": lambda p, b, k: sk.mean(errors(p, b) * jax.nn.softmax(errors(p, b).mean(-1))[:, None]),
        "pairs": lambda p, b, k: sk.mean(jax.nn.relu(1 - b["y"][:, 0] + logits(p, b)[:, :1]) ** 2),
        "by position": lambda p, b, k: sk.mean(errors(p, b).mean(-1) * jnp.arange(len(b["x"]))),
        "stop": lambda p, b, k: sk.mean(
            lax.while_loop(lambda h: jnp.abs(h).max() > 1, lambda h: h / 1.1, lax.stop_gradient(logits(p, b))) - b["y"]
        ),
        "scaled by the largest": lambda p, b, k: sk.mean(logits(p, b) / jnp.abs(logits(p, b)).max()),
        "mean of replicas": lambda p, b, k: sk.scalar(lax.pmean(jnp.sqrt(errors(p, b).mean()), REPLICAS)),
    }.items()
}
"""Losses that mix the rows of a replica."""
