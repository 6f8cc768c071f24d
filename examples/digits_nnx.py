"""Handwritten digits (scikit-learn's bundled set) with a flax nnx CNN: batch norm and dropout on any mesh.

    spmdkit train configs/digits_nnx.yaml

The same model as digits_cnn.py. nnx modules are Python objects; spmdkit trains their parameters, a pytree. The adapter
is `nnx.split` in `init` and `nnx.merge` in the loss.

Shape suffixes: B examples that one call of the loss sees, H height, W width, C channels, K the 10 classes.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
from digits_cnn import REPLICA_AXES, digits, drop, measure
from flax import nnx

import spmdkit as sk


class CNN(nnx.Module):
    """Two convolutions with batch norm, dropout, one dense layer."""

    def __init__(self, width: int, dropout: float, rngs: nnx.Rngs) -> None:
        self.conv_1 = nnx.Conv(1, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm_1 = nnx.BatchNorm(width, momentum=0.9, axis_name=REPLICA_AXES, rngs=rngs)
        self.conv_2 = nnx.Conv(width, 2 * width, (3, 3), 2, use_bias=False, rngs=rngs)
        self.norm_2 = nnx.BatchNorm(2 * width, momentum=0.9, axis_name=REPLICA_AXES, rngs=rngs)
        self.dense = nnx.Linear(4 * 4 * 2 * width, 10, rngs=rngs)
        self.dropout = dropout

    def __call__(self, x_BHWC: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
        """Returns the logits [B, K]. `keys_B` selects training mode: batch statistics and dropout."""
        evaluates = keys_B is None
        x_BHWC = nnx.relu(self.norm_1(self.conv_1(x_BHWC), use_running_average=evaluates))
        x_BHWC = nnx.relu(self.norm_2(self.conv_2(x_BHWC), use_running_average=evaluates))
        x_BC = x_BHWC.reshape(x_BHWC.shape[0], -1)
        return self.dense(x_BC if evaluates else drop(x_BC, self.dropout, keys_B))


@sk.task
def task(width: int = 32, dropout: float = 0.3) -> sk.Task:
    """Returns the task; the arguments are the config's `task_args`.

    Args:
        width: channels after the first convolution; the second has twice as many.
        dropout: probability of dropping a feature before the last layer.
    """
    graph = nnx.graphdef(nnx.eval_shape(lambda: CNN(width, dropout, nnx.Rngs(0))))

    def init(key: jax.Array) -> sk.Variables:
        _, params, state = nnx.split(CNN(width, dropout, nnx.Rngs(key)), nnx.Param, nnx.BatchStat)
        return sk.Variables(params, state)

    def loss_fn(params: Any, state: Any, batch: dict, key: jax.Array) -> tuple[sk.Mean, dict[str, sk.Mean], Any]:
        model = nnx.merge(graph, params, state, copy=True)  # the loss must not modify its arguments
        metrics = measure(model(batch["images"], sk.example_keys()), batch["labels"])
        return metrics.pop("loss"), metrics, nnx.state(model, nnx.BatchStat)

    def eval_fn(params: Any, state: Any, batch: dict) -> dict[str, sk.Mean]:
        return measure(nnx.merge(graph, params, state)(batch["images"]), batch["labels"])

    train_data, eval_data = digits()
    return sk.Task(
        init=init,
        loss_fn=loss_fn,
        eval_fn=eval_fn,
        optimizer=lambda learning_rate: optax.sgd(learning_rate, momentum=0.9, nesterov=True),
        train_data=train_data,
        eval_data=eval_data,
        unit="images",
    )
