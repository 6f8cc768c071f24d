"""A run that exits by `os._exit(0)` or `sys.exit(0)` is not mistaken for a finished one."""

import json
import re

import pytest

pytestmark = pytest.mark.processes

LEAVING = """
import os
import sys
import numpy as np
import jax.numpy as jnp
import optax
import spmdkit as sk

x = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)

class Rows:
    def __len__(self):
        return len(x)
    def __getitem__(self, i):
        if i == 108 and os.environ.get("WAY") == "data" and os.environ.get("SPMDKIT_PROCESS_ID", "1") == "1":
            sys.exit(0)
        if i == 108 and os.environ.get("WAY") == "bad":
            raise OSError("bad sector")
        return x[i]

def leave(run, step, *_):
    if step == 9 and os.environ.get("WAY") == "exit" and os.environ.get("SPMDKIT_PROCESS_ID", "1") == "1":
        os._exit(0)

def loss_fn(params, batch, key):
    return sk.mean((batch @ params["w"] - 1) ** 2)

task = sk.Task(lambda key: {"w": jnp.zeros(4)}, loss_fn, optax.sgd(0.1), train_data=Rows(), eval_data=x[:8], hooks=[sk.Hook("leave", after_step=leave)])
"""  # noqa: E501


@pytest.fixture
def leaving(folder, monkeypatch):
    (folder.path / "task.py").write_text(LEAVING)
    (folder.path / "run.yaml").write_text(
        "task: task.py:task\nrun_dir: run\nsteps: 12\nbatch_size: 16\ndevices: cpu:2\nmesh: {data: -1}\n"
        "data: {shuffle: false}\ncheckpoint: {every_steps: 4}\nlog: {every_steps: 5}\n"
    )

    def run(way, *command):
        monkeypatch.setenv("WAY", way)
        return folder.run(*command)

    return run


def events(folder):
    return [event["event"] for event in folder.events()]


@pytest.mark.slow
def test_exit_code_0_is_reported_until_the_restart(folder, leaving):
    code, output = leaving("exit", "train", "run.yaml")
    assert code == 0, output
    assert "stopped" not in events(folder) and "running" in events(folder)
    message = "the previous attempt ended at step 9 without an exit event"
    code, output = leaving("", "eval", "run.yaml")
    assert code == 0 and message in output, output
    code, output = leaving("", "checkpoint", "ls", "run", "--json")
    assert json.loads(output)["left_at_step"] == 9
    code, output = leaving("", "report", "run")
    page = (folder.path / "run/report.html").read_text()
    assert code == 0 and "exited at step 9</span>" in page and message in page
    code, output = leaving("", "train", "run.yaml")
    assert code == 0 and message in output and "continuing at step" in output, output
    assert events(folder)[-1] == "stopped" and "exited" in events(folder)
    code, output = leaving("", "checkpoint", "ls", "run")
    assert "left at" not in output


def test_launch_names_the_process_that_exited(folder, leaving):
    code, output = leaving("exit", "launch", "-n", "2", "--", "train", "run.yaml")
    last = output.strip().splitlines()
    assert code == 70, output
    assert last[-2].startswith("process 1 failed first with exit code 70, your function or data raised")
    assert re.match(
        r"process 1 ended with exit code 0 at step (9|10), and its work was not done.*os\._exit", last[-1]
    ), output


@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "launched"])
def test_exit_in_the_data_is_70(folder, leaving, launched):
    command = ("launch", "-n", "2", "--", "train", "run.yaml") if launched else ("train", "run.yaml")
    code, output = leaving("data", *command)
    assert code == 70, output
    assert "the batch of step 7 could not be read: train_data[108] raised SystemExit(0)" in output
    assert "Traceback" not in output and "bug in spmdkit" not in output
    if launched:
        assert "process 1 failed first with exit code 70" in output
    else:
        assert "step 6, the last good one, is saved" in output


@pytest.mark.slow
def test_skipped_row_of_process_1_survives_a_restart(folder, leaving):
    command = ("launch", "-n", "2", "--", "train", "run.yaml", "data.max_bad_examples=1", "log.every_steps=1")
    code, output = leaving("bad", *command, "run_dir=whole")
    assert code == 0, output
    assert leaving("bad", *command, "steps=8")[0] == 0
    code, output = leaving("", *command)  # readable by now
    assert code == 0 and "continuing at step 9" in output, output
    trained = [[line for line in folder.metrics(name) if "split" not in line] for name in ("run", "whole")]
    assert trained[0] == trained[1] and len(trained[0]) == 12
    record = json.loads((folder.path / "run/checkpoints/8/record.json").read_text())
    assert record["record"]["left_out_rows"] == [[7, 108]]
    unreadable = [event for event in folder.events() if event["event"] == "unreadable_row"]
    assert [(e["process"], e["row"], e["batch"]) for e in unreadable] == [(1, 108, 7)]
