"""A script as in flax's ImageNet example: a `TrainState` with batch statistics, epochs, an evaluation after each."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

import spmdkit as sk

EPOCHS, BATCH, LOG_EVERY = 4, 32, 4


class TrainState(train_state.TrainState):
    batch_stats: Any


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(32)(x))
        return nn.Dense(4)(nn.relu(x))


@jax.jit
def train_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), (logits, new)

    (loss, (logits, new)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
    return state, {"loss": loss, "accuracy": (logits.argmax(-1) == batch["label"]).mean()}


@jax.jit
def accuracy(state, images, labels):
    logits = state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, images, train=False)
    return (logits.argmax(-1) == labels).mean()


def datasets():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(320, 16)).astype(np.float32)
    data = {"image": images, "label": images[:, :4].argmax(1).astype(np.int32)}
    return {k: x[:256] for k, x in data.items()}, {k: x[256:] for k, x in data.items()}


def train_epoch(run, state, data, rng):
    order = rng.permutation(len(data["image"]))
    for start in run.batches(range(0, len(order), BATCH)):
        rows = order[start : start + BATCH]
        batch = {name: x[rows] for name, x in data.items()}
        state, metrics = run.step(state, batch)
        if start // BATCH % LOG_EVERY == 0:
            print(f"loss {metrics['loss']:.4f}")
    return state


def main():
    model, rng = Classifier(), np.random.default_rng(1)
    train, test = datasets()
    variables = model.init(jax.random.key(0), jnp.zeros((1, 16)), train=False)
    state = TrainState.create(apply_fn=model.apply, tx=optax.adam(1e-2), **variables)
    run = sk.start_run(train_step, state, steps=EPOCHS * 8, run_dir="runs/flax", checkpoint={"every_steps": 5})
    state = run.state
    for epoch in range(EPOCHS):
        state = train_epoch(run, state, train, rng)
        if run.is_replaying:
            continue
        print(f"epoch {epoch}: accuracy {accuracy(state, test['image'], test['label']):.3f}")
    run.close()
    return state


if __name__ == "__main__":
    main()
