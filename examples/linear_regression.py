"""Linear regression, y = 2 x with noise: the smallest task. After training `w` is about 2 and `b` about 0.

    spmdkit train configs/linear_regression.yaml

Three other ways to train it, with the same numbers: custom_step.py, per_replica.py and own_loop.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Returns the parameters of y = w x + b, both zero."""
    return {"w": jnp.zeros(()), "b": jnp.zeros(())}


def loss_fn(params: dict, batch: dict, key: jax.Array | None) -> tuple[sk.Mean, dict[str, sk.Mean]]:
    """Returns the mean squared error over one replica's examples; `w` is a metric so that the log shows it."""
    error = params["w"] * batch["x"] + params["b"] - batch["y"]
    return sk.mean(error**2), {"w": sk.mean(jnp.broadcast_to(params["w"], error.shape))}


def points(num_examples: int, slope: float, noise: float, seed: int) -> dict[str, np.ndarray]:
    """Returns x and y = slope * x + noise, each float32[num_examples]."""
    random = np.random.default_rng(seed)
    x = random.normal(size=num_examples)
    y = slope * x + noise * random.normal(size=num_examples)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


@sk.task
def task(num_examples: int = 1024, slope: float = 2.0, noise: float = 0.1) -> sk.Task:
    """Returns the task; the arguments are the config's `task_args`."""
    return sk.Task(
        init=init,
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.05),
        train_data=points(num_examples, slope, noise, seed=0),
        eval_data=points(num_examples // 4, slope, noise, seed=1),
    )
