"""Data of training and of evaluation that share a handle, as a file with a position or an HDF5 file: nobody reads
between two halves of a read."""

import time

import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support import small_runs

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)


class Handle:
    """A file with a position. `crossed` counts the reads in which somebody else has moved it."""

    def __init__(self):
        self.position, self.crossed = 0, 0

    def read(self, i):
        self.position = i
        time.sleep(0.0005)
        self.crossed += self.position != i
        return X[self.position]


class Rows:
    def __init__(self, handle, first):
        self.handle, self.first = handle, first

    def __len__(self):
        return 32

    def __getitem__(self, i):
        return self.handle.read(self.first + i)


def losses(folder, train_data, eval_data):
    def loss_fn(params, batch, key):
        return sk.mean((batch @ params["w"] - 1) ** 2)

    task = sk.Task(lambda key: {"w": jnp.zeros(3)}, loss_fn, optax.sgd(0.1), train_data=train_data, eval_data=eval_data)
    small_runs.train(folder, task, steps=12, batch_size=8, eval={"every_steps": 2}, log={"every_steps": 1})
    return [line["loss"] for line in small_runs.lines(folder, "metrics.jsonl")]


def test_shared_handle_equals_data_in_memory(tmp_path):
    handle = Handle()
    found = losses(tmp_path / "shared", Rows(handle, 0), Rows(handle, 32))
    assert handle.crossed == 0
    assert found == losses(tmp_path / "memory", X[:32], X[32:])
