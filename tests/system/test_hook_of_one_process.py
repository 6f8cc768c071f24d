"""A hook or a callback that stops one of two processes is ended, and named with its line."""

from __future__ import annotations

import pytest

from tests.support.forks import Process

pytestmark = pytest.mark.processes

TASK = """
import os
import time
import jax
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

X = np.ones((32, 8), np.float32)

def after_step(run, step, state, metrics):
    if step != 2:
        return
    is_second = run.cluster.process_index == 1
    if os.environ["KIND"] == "replace":
        return sk.ReplaceState(state) if is_second else None
    if os.environ["KIND"] == "stop":
        return sk.Stop(why="enough", known=True) if is_second else None
    if os.environ["KIND"] == "callback":
        return
    if os.environ["KIND"] == "fetch":
        np.asarray(state.params["w"])
    whole = run.gather(state.params) if os.environ["KIND"] == "main" else state.params
    if run.cluster.is_main:
        print("sum", float(jnp.sum(whole["w"])), type(whole["w"]).__name__)

hook = sk.Hook("samples", after_step=after_step, on="main" if os.environ["KIND"] == "main" else "all")

def pause(x):
    if os.environ["KIND"] == "callback" and os.environ["SPMDKIT_PROCESS_ID"] == "1":
        time.sleep(60)

def loss_fn(params, batch, key):
    jax.debug.callback(pause, batch[0, 0])
    return sk.mean(((batch @ params["w"]) ** 2).mean(-1))

task = sk.Task(lambda key: {"w": jnp.ones((8, 8))}, loss_fn, optax.sgd(0.0), train_data=X, hooks=[hook])
"""

CONFIG = """
task: task.py:task
run_dir: run
batch_size: 8
steps: 9
devices: cpu:2
mesh: {fsdp: 2}
layout: {min_shard_bytes: 1}
checkpoint: null
watchdog: {hook_timeout_s: 2, step_timeout_s: 30}
"""


def train(forks, folder, kind, *options):
    (folder / "task.py").write_text(TASK)
    (folder / "run.yaml").write_text(CONFIG)
    return forks.together([Process(["train", "run.yaml", *options], folder, {"KIND": kind})] * 2)


def test_hook_of_one_process_is_ended_with_its_line(forks, tmp_path):
    ended = train(forks, tmp_path, "compute")
    assert 76 in [p.code for p in ended], ended
    assert "process 0 is in hook 'samples' at" in ended[0].output and "task.py:26 for longer" in ended[0].output


@pytest.mark.parametrize(
    ("kind", "action"), [("replace", "sk.ReplaceState"), pytest.param("stop", "sk.Stop", marks=pytest.mark.slow)]
)
def test_action_of_one_process_is_named_with_its_hook(kind, action, forks, tmp_path):
    ended = train(forks, tmp_path, kind)
    assert [p.code for p in ended] == [76, 76], ended
    line = f"hook 'samples' at {tmp_path / 'task.py'}:12 returned {action} on process 1, and another process left it"
    assert line in ended[0].output and line in ended[1].output, ended


def test_callback_that_hangs_is_named_with_its_line(forks, tmp_path):
    ended = train(forks, tmp_path, "callback", "watchdog.step_timeout_s=5", "mesh={data: 2}", "layout={}")
    assert [p.code for p in ended] == [76, 76], ended
    line = f"no progress: p1 has been in a callback of the step at {tmp_path / 'task.py'}:32 for"
    assert line in ended[0].output and line in ended[1].output, ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [("fetch", "run.gather(tree) returns host arrays"), ("main", "run.gather is called on process 0 only")],
)
def test_array_of_several_processes_is_no_error_of_tracing(forks, tmp_path, kind, words):
    ended = train(forks, tmp_path, kind)
    assert ended[0].code == 70 and words in ended[0].output and "cannot be traced" not in ended[0].output, ended
