"""`sk.per_process(source)`: each process reads data of its own. No row is read twice in an epoch, and a short host is
padded."""

from __future__ import annotations

import json

import pytest

from tests.support.forks import Process

pytestmark = pytest.mark.processes

TASK = """
import os
import jax
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

PROCESS = int(os.environ.get("SPMDKIT_PROCESS_ID", 0))

class Rows:
    # Row i of process p is 100 p + i.
    def __len__(self):
        return (22, 10)[PROCESS]
    def __getitem__(self, i):
        return {"id": np.full(2, 100 * PROCESS + i, np.float32)}

@sk.task
def task():
    def loss_fn(params, batch, key):
        row = batch["id"][:, 0]
        loss = sk.mean((params["w"].sum() * row / 100 - 1) ** 2)
        return loss, {"rows": sk.sum(jnp.ones_like(row)), "total": sk.sum(row), "squares": sk.sum(row**2)}

    data = sk.per_process(Rows())
    return sk.Task(lambda key: {"w": jnp.zeros(2)}, loss_fn, optax.sgd(0.01), train_data=data, eval_data=data)
"""

CONFIG = """
task: task.py:task
batch_size: 8
steps: 12
devices: cpu:2
mesh: {data: 2}
data: {drop_remainder: false}
checkpoint: {every_steps: 5}
log: {every_steps: 1}
"""

FIRST, SECOND = range(22), range(100, 110)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def train(forks, folder, *overrides):
    return forks.together([Process(["train", "run.yaml", "run_dir=run", *overrides], folder)] * 2)


def metrics(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def sums(lines):
    """Returns (rows, sum of ids, sum of their squares) of some steps: equal only where each row came exactly once."""
    return tuple(sum(line[name] for line in lines) for name in ("rows", "total", "squares"))


def expected(*rows):
    ids = [i for each in rows for i in each]
    return len(ids), sum(ids), sum(i * i for i in ids)


@pytest.mark.parametrize("restart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_row_comes_once_per_epoch(forks, folder, restart):
    if restart:
        assert [p.code for p in train(forks, folder, "steps=9")] == [0, 0]
    ended = train(forks, folder)
    assert [p.code for p in ended] == [0, 0], ended
    assert ("continuing at step 10" in ended[0].output) == restart
    trained = [line for line in metrics(folder) if "split" not in line]
    assert [line["step"] for line in trained] == list(range(1, 13))
    for epoch in (trained[:6], trained[6:]):  # process 0 has 22 rows, 4 in each batch
        assert sums(epoch) == expected(FIRST, SECOND)
        assert [line["rows"] for line in epoch] == [8, 8, 6, 4, 4, 2]
    assert [line["total"] for line in trained[:6]] != [line["total"] for line in trained[6:]], (
        "an epoch has its own order"
    )
    evaluated = [line for line in metrics(folder) if "split" in line]
    assert sums(evaluated[-1:]) == expected(FIRST, SECOND)


@pytest.mark.slow
def test_processes_with_equal_rows_cannot_have_own_data(forks, folder):
    ended = train(forks, folder, "mesh={data: 1, tensor: 2}", 'layout={rules: [["w", ["tensor"]]]}')
    assert [p.code for p in ended] == [78, 78], ended
    assert all("the same rows" in p.output for p in ended)
