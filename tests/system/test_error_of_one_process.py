"""An error of the user's code in one of two processes ends both, and a restart gives the same bitwise result."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.forks import Process

pytestmark = pytest.mark.processes

TASK = '''
import os
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

KIND, WHO = os.environ.get("FAULT", ""), os.environ.get("WHO", "1")
HERE = os.environ.get("SPMDKIT_PROCESS_ID", "0") == WHO
X = np.random.default_rng(0).normal(size=(96, 3)).astype(np.float32)

def act(kind):
    if HERE and KIND == kind:
        with open("fired", "w"):
            raise ValueError(f"the {kind} is broken")

class Rows:
    """Rows 48 to 55 are batch 7; process 1 has the second half of it."""
    def __len__(self):
        return len(X)
    def __getitem__(self, i):
        if i == (54 if WHO == "1" else 50):
            act("source")
        return X[i]

def after_step(run, step, *_):
    if step == 5:
        act("hook")

def loss_fn(params, batch, key):
    return sk.mean((batch @ params["w"] - batch.sum(-1)) ** 2)

task = sk.Task(lambda key: {"w": jnp.zeros(3)}, loss_fn, optax.adam(0.1), train_data=Rows(),
               hooks=[sk.Hook("mine", after_step=after_step)])
'''

CONFIG = """
task: task.py:task
run_dir: run
batch_size: 8
steps: 12
devices: cpu:2
mesh: {data: 2}
data: {shuffle: false}
checkpoint: {every_steps: 5}
log: {every_steps: 1, progress: plain}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def train(forks, folder, run, *overrides, **variables):
    return forks.together([Process(["train", "run.yaml", f"run_dir={run}", *overrides], folder, variables)] * 2)


def losses(folder, run):
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], line.get("split")): line["loss"] for line in lines}


def test_error_of_one_process_ends_both(forks, folder):
    check_end_of_both(forks, folder, "source", 1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "who"), [("source", 0), ("hook", 0)])
def test_restart_after_an_error_equals_clean_run(forks, folder, kind, who):
    check_end_of_both(forks, folder, kind, who)
    for run in (kind, "clean"):
        ended = train(forks, folder, run)
        assert [p.code for p in ended] == [0, 0], ended
    assert losses(folder, kind) == losses(folder, "clean")


def check_end_of_both(forks, folder, kind, who):
    ended = train(forks, folder, kind, FAULT=kind, WHO=str(who))
    assert (folder / "fired").exists()
    assert (ended[who].code, ended[1 - who].code) == (70, 75), ended
    assert f"the {kind} is broken" in ended[who].output and "Traceback" not in ended[1 - who].output
    assert re.search(rf"process {who} .*exit code 70", ended[1 - who].output), ended
    assert "emergency_saved" not in (folder / kind / "events.jsonl").read_text()
