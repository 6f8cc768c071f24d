"""Random losses from natural parts: inputs, layers, losses, masks and means, some of which mix the rows of a replica.
`loss_of(seed)` always returns the same loss."""

import random

import jax
import jax.numpy as jnp
from jax import lax

import spmdkit as sk
from tests.step.row_programs import (
    CLASSES,
    batch_norm,
    batch_norm_of_all,
    cross_entropy,
    token_losses,
    token_mask,
    unit,
)


def attention(h, others):
    return h + jax.nn.softmax(h @ others.T) @ others


def dropout(h, layer):
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (CLASSES,)))(sk.example_keys(layer))
    return h * kept / 0.8


def with_loop(h):
    step = lambda carry, scale: (jnp.tanh(carry * scale), None)
    return lax.scan(step, h, jnp.linspace(0.5, 1.5, 3))[0]


INPUTS = {
    "features": lambda p, b: b["x"] @ p["w"],
    "mean of tokens": lambda p, b: jnp.take(p["table"], b["tokens"], axis=0).mean(1),
    "masked tokens": lambda p, b: (jnp.take(p["table"], b["tokens"][:, 1:], axis=0) * token_mask(b)[..., None]).sum(1),
    "both views": lambda p, b: (lambda z: z[: len(b["x"])] * z[len(b["x"]) :])(
        jnp.concatenate([b["x"], jnp.sin(b["x"])]) @ p["w"]
    ),
}
LAYERS = {
    "tanh": lambda h, p: jnp.tanh(h @ p["table"]),
    "layer norm": lambda h, p: jax.nn.standardize(h),
    "softmax": lambda h, p: jax.nn.log_softmax(h),
    "sort": lambda h, p: jnp.sort(h, axis=-1),
    "dropout": lambda h, p: dropout(h, p["layer"]),
    "loop": lambda h, p: with_loop(h),
    "remat": lambda h, p: jax.checkpoint(lambda h: jnp.sin(h @ p["table"]))(h),
    "batch norm of all": lambda h, p: batch_norm_of_all(h),
    "attention over all": lambda h, p: attention(h, sk.all_gather(h)),
    "scaled by the sum of all": lambda h, p: h / (1 + sk.psum((h**2).sum())),
}
MIXING_LAYERS = {
    "batch norm": lambda h, p: batch_norm(h),
    "centered": lambda h, p: jnp.tanh(h - h.mean(0)),
    "noise of a constant key": lambda h, p: h + jax.random.normal(jax.random.key(0), h.shape),
    "attention": lambda h, p: attention(h, h),
    "mixup": lambda h, p: h + jnp.roll(h, 1, axis=0),
    "cumulative": lambda h, p: jnp.cumsum(h, axis=0),
    "largest": lambda h, p: h / jnp.abs(h).max(),
    "mean of replicas": lambda h, p: h * sk.pmean(jnp.sqrt((h**2).mean())),
}
LOSSES = {
    "squares": lambda h, b: ((h - b["y"]) ** 2).mean(-1),
    "cross entropy": lambda h, b: cross_entropy(h, b["label"]),
    "by index": lambda h, b: -jax.nn.log_softmax(h)[jnp.arange(len(h)), b["label"]],
    "huber": lambda h, b: jnp.where(jnp.abs(h - b["y"]) < 1, (h - b["y"]) ** 2, jnp.abs(h - b["y"])).sum(-1),
    "contrast with all": lambda h, b: cross_entropy(
        unit(h) @ unit(sk.all_gather(b["y"])).T, sk.replica_index() * len(h) + jnp.arange(len(h))
    ),
}
MIXING_LOSSES = {
    "contrast": lambda h, b: cross_entropy(unit(h) @ unit(b["y"]).T, jnp.arange(len(h))),
    "ranked": lambda h, b: jnp.sort(((h - b["y"]) ** 2).mean(-1)) * jnp.linspace(0, 1, len(h)),
}
MEANS = {
    "mean": lambda x, p, b: sk.mean(x),
    "where": lambda x, p, b: sk.mean(x, where=b["label"] > 1),
    "weights": lambda x, p, b: sk.mean(x, weights=b["length"].astype(jnp.float32)),
    "number": lambda x, p, b: sk.mean(x.mean()),
    "divided": lambda x, p, b: sk.scalar((x / x.shape[0]).sum()),
    "penalty": lambda x, p, b: sk.mean(x) + 0.01 * (p["w"] ** 2).sum(),
    "two means": lambda x, p, b: sk.mean(x) + 0.1 * sk.mean(token_losses(p, b), where=token_mask(b)),
    "added mean": lambda x, p, b: sk.mean(x + 0.1 * x.mean()),
}
MIXING_MEANS = {
    "root": lambda x, p, b: sk.mean(jnp.sqrt(1e-3 + (x**2).mean())),
    "by hand": lambda x, p, b: sk.scalar((x * (b["label"] > 1)).sum() / (b["label"] > 1).sum().clip(1)),
    "sum": lambda x, p, b: sk.scalar(x.sum()),
    "log": lambda x, p, b: sk.scalar(jnp.log(jnp.exp(x).mean())),
}


STATES = {
    "mean": (jnp.zeros(CLASSES), lambda s, h, b: 0.9 * s + 0.1 * h.mean(0)),
    "seen": (jnp.float32(0), lambda s, h, b: s + b["x"].shape[0]),
    "labels": (jnp.zeros(CLASSES), lambda s, h, b: s.at[b["label"]].add(1.0)),
    "long rows": (jnp.int32(0), lambda s, h, b: s + (b["length"] > 2).sum()),
    "queue": (jnp.zeros((24, CLASSES)), lambda s, h, b: jnp.concatenate([sk.all_gather(h), s])[:24]),
}
"""name -> (start, update from the old value, the layers' result and the batch): right on every mesh without an entry in
`Task.state_reduction`."""


def with_state(seed):
    """Returns (names, whether rows are mixed, start of the model state, loss with that state)."""
    rng = random.Random(seed)
    names, mixes, loss = loss_of(seed)
    state = rng.sample(sorted(STATES), 2)

    def loss_fn(params, state, batch, key):
        h = jax.lax.stop_gradient(INPUTS[names[0]](params, batch))
        return loss(params, batch, key), {}, {name: STATES[name][1](x, h, batch) for name, x in state.items()}

    return names, mixes, {name: STATES[name][0] for name in state}, loss_fn


def loss_of(seed):
    """Returns (names of the parts, whether one of them mixes rows, loss)."""
    rng = random.Random(seed)
    pick = lambda equal, mixing, often: rng.choice(sorted((mixing if rng.random() < often else equal).items()))
    parts = [pick(INPUTS, {}, 0)]
    parts += [pick(LAYERS, MIXING_LAYERS, 0.15) for _ in range(rng.randint(1, 3))]
    parts += [pick(LOSSES, MIXING_LOSSES, 0.15), pick(MEANS, MIXING_MEANS, 0.15)]
    names = [name for name, _ in parts]
    mixes = any(fn in part.values() for part in (MIXING_LAYERS, MIXING_LOSSES, MIXING_MEANS) for _, fn in parts)
    (_, inputs), *layers, (_, loss), (_, mean) = parts

    def loss_fn(params, batch, key):
        h = inputs(params, batch)
        for i, (_, layer) in enumerate(layers):
            h = layer(h, {**params, "layer": i})
        return mean(loss(h, batch), params, batch)

    return names, mixes, loss_fn
