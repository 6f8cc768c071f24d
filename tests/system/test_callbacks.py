"""A callback that raises in a step of eight devices: one message and 70, where XLA would abort the process with a C++
stack after 40 s."""

import json

import pytest

from tests.support.forks import Process

pytestmark = pytest.mark.processes

TASK = """
import jax, jax.numpy as jnp, numpy as np, optax, spmdkit as sk

calls = []

def raises(value):
    calls.append(value)
    if len(calls) == 20:  # one device of eight, in the third step
        raise ValueError("mine")

def loss_fn(params, batch, key):
    jax.debug.callback(raises, batch.sum())
    return sk.mean(batch @ params["w"])

def number(value):
    raises(value)
    return np.float32(0)

def with_a_result(params, batch, key):
    given = jax.pure_callback(number, jax.ShapeDtypeStruct((), np.float32), jax.lax.stop_gradient(batch).sum())
    return sk.mean(batch @ params["w"] + given)

init, x = lambda key: {"w": jnp.zeros(3)}, np.ones((64, 3), np.float32)
task = sk.Task(init, loss_fn, optax.sgd(0.1), train_data=x)
pure = sk.Task(init, with_a_result, optax.sgd(0.1), train_data=x)
"""
CONFIG = """
task: task.py:task
run_dir: run
steps: 30
batch_size: 8
devices: cpu:8
checkpoint: {every_steps: 1}
log: {every_steps: 1, progress: plain}
"""


@pytest.mark.forms(1)
@pytest.mark.parametrize(
    ("mesh", "task"), [("{data: 8}", "pure"), ("{data: 8}", "task"), ("{fsdp: 4, data: 2}", "task")]
)
def test_callback_error_ends_run_with_one_message(forks, tmp_path, mesh, task):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (ended,) = forks.run([Process(["train", "run.yaml", f"mesh={mesh}", f"task=task.py:{task}"], tmp_path)])
    assert ended.code == 70, ended
    (at,) = [n for n, line in enumerate(ended.output.splitlines()) if "a callback in the step raised" in line]
    message = ended.output.splitlines()[at:]
    assert f"{tmp_path}/task.py:9, in raises: ValueError: mine" in message[0] and len(message) == 2, ended.output
    assert "Traceback" not in ended.output and "rendezvous" not in ended.output
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["code"] for event in events if event["event"] == "fault"] == [70]
