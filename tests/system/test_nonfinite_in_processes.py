"""A gradient that is not finite on the devices of one of two processes: `stop`, `skip` and `rollback` are done by both
at one step."""

from __future__ import annotations

import json
import math

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


def test_stop_names_the_batch_and_its_row_on_both_also_where_the_state_was_to_be_saved(forks, folder):
    """Process 1 alone holds the part of the gradient that is not finite; the save of that step comes before all have
    agreed to stop."""
    ended = train(forks, folder, "run", "mesh={fsdp: 2}", "layout={zero: 3, min_shard_bytes: 1}")
    assert [p.code for p in ended] == [77, 77], ended
    for process in ended:
        assert "not finite at step 6: the gradient, after batch 6" in process.output, ended
        assert "40 to 47" in process.output and "newest checkpoint is of step 3" in process.output
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["3"]


def test_skip_leaves_the_step_out_on_both_as_one_process_does(forks, folder):
    ended = [
        *train(forks, folder, "two", "on_nonfinite=skip"),
        *train(forks, folder, "one", "on_nonfinite=skip", num=1),
    ]
    assert [p.code for p in ended] == [0, 0, 0], ended
    assert {e["batch"] for e in events(folder, "two", "skipped")} == {6}
    assert losses(folder, "two") == pytest.approx(losses(folder, "one"), rel=1e-5)


@pytest.mark.slow
def test_a_rollback_of_both_is_bit_for_bit_a_run_without_the_batch(forks, folder):
    ended = train(forks, folder, "back", "on_nonfinite=rollback", "steps=9")
    assert [p.code for p in ended] == [0, 0], ended
    assert events(folder, "back", "rolled_back")
    ended = train(forks, folder, "without", "data.skip_batches=[6]", "steps=9")
    assert [p.code for p in ended] == [0, 0], ended
    assert losses(folder, "back") == losses(folder, "without")


LAST_UPDATE = """
import jax.numpy as jnp
import optax
import spmdkit as sk
from task import loss_fn, x

rate = lambda count: jnp.where(count == 9, jnp.inf, 0.01)  # of the tenth and last step
task = sk.Task(lambda key: {"w": jnp.ones(4)}, loss_fn, optax.sgd(rate), train_data={"x": x[:40]})
"""


@pytest.mark.parametrize("checkpoint", ["null", "{every_steps: 3}"])
def test_a_last_update_that_no_loss_has_seen_does_not_end_in_0(forks, folder, checkpoint):
    (folder / "last_update.py").write_text(LAST_UPDATE)
    (ended,) = train(forks, folder, "run", "task=last_update.py:task", f"checkpoint={checkpoint}", num=1)
    assert ended.code == 77 and "the state is not finite at step 10: 'params/w'" in ended.output, ended
    assert "Traceback" not in ended.output
    assert all(map(math.isfinite, losses(folder, "run").values()))
    assert events(folder, "run", "fault")[-1]["code"] == 77 and not events(folder, "run", "stopped")
