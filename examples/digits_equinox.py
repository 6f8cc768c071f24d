"""Handwritten digits (scikit-learn's bundled set) with a small equinox MLP.

    spmdkit train configs/digits_equinox.yaml

An equinox module is a pytree of arrays and functions. spmdkit trains its arrays: the adapter is `eqx.filter` in `init`
and `eqx.combine` in the loss. Modules are written for one example, so dropout needs only a key per example.

Shape suffixes: B examples that one call of the loss sees, K the 10 classes.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from digits_cnn import digits, measure

import spmdkit as sk


class Classifier(eqx.Module):
    """An MLP on the 64 pixels with dropout on them."""

    dropout: eqx.nn.Dropout
    mlp: eqx.nn.MLP

    def __init__(self, width: int, depth: int, dropout: float, key: jax.Array) -> None:
        self.dropout = eqx.nn.Dropout(dropout)
        self.mlp = eqx.nn.MLP(64, 10, width, depth, key=key)

    def __call__(self, image: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Returns the logits [K] of one image. Without a key nothing is dropped."""
        return self.mlp(self.dropout(jnp.ravel(image), key=key, inference=key is None))


@sk.task
def task(width: int = 128, depth: int = 2, dropout: float = 0.1) -> sk.Task:
    """Returns the task; the arguments are the config's `task_args`.

    Args:
        width: width of the hidden layers.
        depth: number of hidden layers.
        dropout: probability of dropping a pixel.
    """

    def make(key: jax.Array) -> Classifier:
        return Classifier(width, depth, dropout, key)

    functions = eqx.filter(eqx.filter_eval_shape(make, jax.random.key(0)), _is_abstract_array, inverse=True)

    def init(key: jax.Array) -> Classifier:
        return eqx.filter(make(key), eqx.is_array)

    def loss_fn(params: Classifier, batch: dict, key: jax.Array | None) -> tuple[sk.Mean, dict[str, sk.Mean]]:
        model = eqx.combine(params, functions)
        if key is None:
            logits_BK = jax.vmap(model)(batch["images"])
        else:
            logits_BK = jax.vmap(model)(batch["images"], sk.example_keys())
        metrics = measure(logits_BK, batch["labels"])
        return metrics.pop("loss"), metrics

    train_data, eval_data = digits()
    return sk.Task(
        init=init, loss_fn=loss_fn, optimizer=optax.adamw, train_data=train_data, eval_data=eval_data, unit="images"
    )


def _is_abstract_array(x: object) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)
