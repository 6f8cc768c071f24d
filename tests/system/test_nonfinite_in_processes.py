"""A gradient that is not finite on the devices of one of two processes: `stop`, `skip` and `rollback` are done by both
at one step."""

from __future__ import annotations

import json

import pytest

from tests.support.forks import Process

pytestmark = pytest.mark.processes

TASK = """
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

x = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32)
x[45, 3] = 0  # of batch 6: the root has no derivative there, the loss is finite

def loss_fn(params, batch, key):
    return sk.mean((jnp.sqrt((batch["x"] * params["w"]) ** 2).sum(-1) - 1) ** 2)

task = sk.Task(lambda key: {"w": jnp.ones(4)}, loss_fn, optax.adam(0.1), train_data={"x": x})
"""

CONFIG = """
task: task.py:task
batch_size: 8
steps: 10
devices: cpu:2
mesh: {data: 2}
data: {shuffle: false}
checkpoint: {every_steps: 3}
log: {every_steps: 5, progress: plain}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def train(forks, folder, run, *overrides, num=2):
    processes = [Process(["train", "run.yaml", f"run_dir={run}", *overrides], folder)] * num
    return forks.together(processes) if num > 1 else forks.run(processes)


def losses(folder, run):
    return {x["step"]: x["loss"] for x in map(json.loads, (folder / run / "metrics.jsonl").read_text().splitlines())}


def events(folder, run, name):
    return [e for e in map(json.loads, (folder / run / "events.jsonl").read_text().splitlines()) if e["event"] == name]


def test_stop_names_the_batch_on_both_processes(forks, folder):
    """Process 1 alone holds the part of the gradient that is not finite; the save of that step comes before all have
    agreed to stop."""
    ended = train(forks, folder, "run", "mesh={fsdp: 2}", "layout={zero: 3, min_shard_bytes: 1}")
    assert [p.code for p in ended] == [77, 77], ended
    for process in ended:
        assert "not finite at step 6: the gradient, after batch 6" in process.output, ended
        assert "40 to 47" in process.output and "newest checkpoint is of step 3" in process.output
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["3"]


@pytest.mark.slow
def test_skip_on_both_equals_one_process(forks, folder):
    ended = [
        *train(forks, folder, "two", "on_nonfinite=skip"),
        *train(forks, folder, "one", "on_nonfinite=skip", num=1),
    ]
    assert [p.code for p in ended] == [0, 0, 0], ended
    assert {e["batch"] for e in events(folder, "two", "skipped")} == {6}
    assert losses(folder, "two") == pytest.approx(losses(folder, "one"), rel=1e-5)


@pytest.mark.slow
def test_rollback_of_both_equals_skipped_batch(forks, folder):
    ended = train(forks, folder, "back", "on_nonfinite=rollback", "steps=9")
    assert [p.code for p in ended] == [0, 0], ended
    assert events(folder, "back", "rolled_back")
    ended = train(forks, folder, "without", "data.skip_batches=[6]", "steps=9")
    assert [p.code for p in ended] == [0, 0], ended
    assert losses(folder, "back") == losses(folder, "without")
