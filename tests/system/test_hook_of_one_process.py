"""A hook that computes on a sharded state on one of two processes is ended with its line."""

from __future__ import annotations

import pytest

from tests.support.forks import Process

pytestmark = pytest.mark.processes

TASK = """
import os
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

X = np.ones((32, 8), np.float32)

def after_step(run, step, state, metrics):
    if step != 2:
        return
    if os.environ["KIND"] == "fetch":
        np.asarray(state.params["w"])
    whole = run.gather(state.params) if os.environ["KIND"] == "main" else state.params
    if run.cluster.is_main:
        print("sum", float(jnp.sum(whole["w"])), type(whole["w"]).__name__)

hook = sk.Hook("samples", after_step=after_step, on="main" if os.environ["KIND"] == "main" else "all")
loss_fn = lambda params, batch, key: sk.mean(((batch @ params["w"]) ** 2).mean(-1))
task = sk.Task(lambda key: {"w": jnp.ones((8, 8))}, loss_fn, optax.sgd(0.0), train_data=X, hooks=[hook])
"""

CONFIG = """
task: task.py:task
run_dir: run
batch_size: 8
steps: 4
devices: cpu:2
mesh: {fsdp: 2}
layout: {min_shard_bytes: 1}
checkpoint: null
watchdog: {hook_timeout_s: 2}
"""


def train(forks, folder, kind):
    (folder / "task.py").write_text(TASK)
    (folder / "run.yaml").write_text(CONFIG)
    return forks.together([Process(["train", "run.yaml"], folder, {"KIND": kind})] * 2)


def test_hook_of_one_process_is_ended_with_its_line(forks, tmp_path):
    ended = train(forks, tmp_path, "compute")
    assert 76 in [p.code for p in ended], ended
    assert "process 0 is in hook 'samples' at" in ended[0].output and "task.py:17 for longer" in ended[0].output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [("fetch", "run.gather(tree) returns host arrays"), ("main", "run.gather is called on process 0 only")],
)
def test_array_of_several_processes_is_no_error_of_tracing(forks, tmp_path, kind, words):
    ended = train(forks, tmp_path, kind)
    assert ended[0].code == 70 and words in ended[0].output and "cannot be traced" not in ended[0].output, ended
