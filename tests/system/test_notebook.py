"""A notebook in a real kernel: devices of the first cell, two trainings, the stop button, a changed cell, an error."""

import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

pytestmark = pytest.mark.processes

TASK = """
import os, signal
import jax.numpy as jnp, numpy as np, optax
import spmdkit as sk

x = np.linspace(-1, 1, 64 * 4, dtype=np.float32).reshape(64, 4)
data = {"x": x, "y": x.sum(1)}
SCALE = 1.0

def init(key):
    return {"w": jnp.zeros(4)}

def loss_fn(params, batch, key):
    return sk.mean(SCALE * (batch["x"] @ params["w"] - batch["y"]) ** 2)

def make_task():
    return sk.Task(init, loss_fn, optax.sgd(0.1), data)

settings = dict(batch_size=16, devices="cpu:4", mesh={"data": -1})
first = sk.train(task=make_task(), steps=4, **settings)
first
"""
SECOND = (
    "second = sk.train(task=make_task(), steps=4, seed=1, **settings)\nprint(second.run_dir.name, first.run_dir.name)"
)
STOP = """
def stop(run, step, state, metrics):
    if step == 20:
        os.kill(os.getpid(), signal.SIGINT)   # what the stop button sends to the kernel

slow = sk.Task(init, loss_fn, optax.sgd(0.1), data, hooks=[sk.Hook("stop", after_step=stop)])
more = settings | dict(run_dir="runs/long", steps=200)
try:
    sk.train(task=slow, **more)
except sk.SpmdkitError as error:
    print(type(error).__name__, error)
rest = sk.train(task=slow, **more)
print("first step after the stop:", rest.run.first_step, "last:", int(rest.state.step))
"""
CHANGED = "SCALE = 1000.0\nagain = sk.train(task=make_task(), steps=8, run_dir=str(first.run_dir), **settings)"
WRONG = """
wrong = sk.Task(init, lambda params, batch, key: params["w"].sum(), optax.sgd(0.1), data)
sk.train(task=wrong, steps=4, **settings)
"""


def text_of(cell):
    return "".join(out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in cell.outputs)


def test_a_notebook_trains_stops_and_reports_changes(tmp_path):
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in (TASK, SECOND, STOP, CHANGED, WRONG)]
    )
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    with pytest.raises(CellExecutionError):  # of the last cell
        client.execute()
    first, second, stopped, changed, wrong = notebook.cells
    assert "4 of 4 cpu devices, mesh data 4" in text_of(first) and "Result: step 4 of 4  loss" in text_of(first)
    assert max(len(line) for line in text_of(first).splitlines()) <= 200 and text_of(first).count("\n") < 20
    assert "run-2 run-1\n" in text_of(second)
    assert "Preempted stopped after step" in text_of(stopped) and "by SIGINT; saved" in text_of(stopped)
    began, ended = re.search(r"first step after the stop: (\d+) last: (\d+)", text_of(stopped)).groups()
    assert 20 < int(began) < 200 and int(ended) == 200
    assert "the step of the task  text " in text_of(changed) and "steps" in text_of(changed)
    (error,) = [out for out in wrong.outputs if out.output_type == "error"]
    assert len(error.traceback) <= 4 and "sk.mean" in "".join(error.traceback), error.traceback
