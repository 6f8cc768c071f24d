"""A custom training step in the global view: the linear regression with a step that also reports the gradient's norm.

    spmdkit train configs/custom_step.yaml

In the global view arrays are global: `batch` is the whole batch and `grads` the gradient over all of it, on any mesh.
Only the loss inside `sk.value_and_grad`, which makes the one reduction of the step, sees the examples of one replica.
"""

from __future__ import annotations

import dataclasses

import jax
import linear_regression
import optax

import spmdkit as sk


def train_step(state: sk.TrainState, batch: dict) -> tuple[sk.TrainState, dict[str, jax.Array]]:
    """Returns the state after one step, and its metrics."""
    loss_fn = sk.value_and_grad(linear_regression.loss_fn)
    (loss, metrics), grads = loss_fn(state.params, batch, state.key)
    return state.apply_gradients(grads), {"loss": loss, "gradient_norm": optax.tree.norm(grads), **metrics}


@sk.task
def task() -> sk.Task:
    """Returns the linear regression with the step above; its `loss_fn` still evaluates."""
    return dataclasses.replace(linear_regression.task(), train_step=train_step)
