"""A custom training step for one replica, as with Horovod, pmap and `strategy.run`: the linear regression.

    spmdkit train configs/per_replica.yaml

In this view the whole step runs once per replica on that replica's own examples, and you write the reductions. Reducing
twice or not at all is an error here, not a gradient that is N times too large. Only the mesh axes `replica` and `data`
can be used; the global view (custom_step.py) has no such limit.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import linear_regression

import spmdkit as sk


def replica_loss(params: dict, batch: dict) -> jax.Array:
    """Returns the mean squared error over this replica's own examples."""
    error = params["w"] * batch["x"] + params["b"] - batch["y"]
    return jnp.mean(error**2)


def train_step(state: sk.TrainState, batch: dict) -> tuple[sk.TrainState, dict[str, jax.Array]]:
    """Returns the state after one step. Replicas hold equal numbers of examples, so the mean of their means is the
    mean."""
    loss, grads = sk.pmean(jax.value_and_grad(replica_loss)(state.params, batch))
    return state.apply_gradients(grads), {"loss": loss}


@sk.task
def task() -> sk.Task:
    """Returns the linear regression with the step above; its `loss_fn` still evaluates."""
    return dataclasses.replace(linear_regression.task(), train_step=train_step, view="replica")
