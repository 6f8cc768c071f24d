"""A task with parameters that count batches: after training with plain SGD at rate 1, `params[leaf][i]` is how often
the batch of example i was applied.

Each example is delayed by the seconds in the file `pace` next to the run's config, so that a test controls the speed of
training.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk

NUM_EXAMPLES = 8192


class Examples:
    """Numbers from 0. Each read is delayed by the time in the file."""

    def __init__(self, pace: Path):
        self._pace = pace

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(float(self._pace.read_text() or 0))
        return {"number": np.int32(index)}


@sk.task
def task(pace: str) -> sk.Task:
    """Returns the task.

    Args:
        pace: path of the file.
    """

    def loss_fn(params: Any, batch: Any, key: Any) -> Any:
        taken = sum(leaf[batch["number"]] for leaf in params.values())
        return sk.mean(-taken)

    zeros = {"a": jnp.zeros(NUM_EXAMPLES), "b": jnp.zeros(NUM_EXAMPLES)}
    return sk.Task(lambda key: zeros, loss_fn, optax.sgd(1.0), train_data=Examples(Path(pace)))
