"""What the user's code raises in one of two processes costs no step: both save the last good one, both end with 70, and
a restart gives the same bits."""

from __future__ import annotations

import json

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
    def __init__(self, name):
        self.name = name
    def __len__(self):
        return len(X)
    def __getitem__(self, i):
        if self.name == "source" and i == (54 if WHO == "1" else 50):
            act("source")
        if self.name == "evaluation" and stepped[0] == 8:
            act("evaluation")
        return X[i]

stepped = [0]

def after_step(run, step, *_):
    stepped[0] = step
    if step == 5:
        act("hook")

def loss_fn(params, batch, key):
    return sk.mean((batch @ params["w"] - batch.sum(-1)) ** 2)

task = sk.Task(lambda key: {"w": jnp.zeros(3)}, loss_fn, optax.adam(0.1), train_data=Rows("source"), eval_data=Rows("evaluation"),
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
eval: {every_steps: 4}
checkpoint: {every_steps: 5}
log: {every_steps: 1, progress: plain}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, forks):
    """Holds `clean`, a run of two processes to its end."""
    folder = tmp_path_factory.mktemp("errors")
    (folder / "task.py").write_text(TASK)
    (folder / "run.yaml").write_text(CONFIG)
    ended = train(forks, folder, "clean")
    assert [p.code for p in ended] == [0, 0], ended
    return folder


def train(forks, folder, run, *overrides, **variables):
    return forks.together([Process(["train", "run.yaml", f"run_dir={run}", *overrides], folder, variables)] * 2)


def losses(folder, run):
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], line.get("split")): line["loss"] for line in lines}


def saved(folder, run):
    return sorted(int(path.name) for path in (folder / run / "checkpoints").iterdir() if path.name.isdigit())


@pytest.mark.parametrize(
    ("kind", "who", "last"),
    [("source", 1, 6), ("hook", 0, 5), pytest.param("evaluation", 1, 8, marks=pytest.mark.slow)],
    ids=["data", "a hook, at a step that all save", "data of an evaluation"],
)
def test_an_error_in_one_process_saves_the_last_good_step_of_all_and_names_it(forks, folder, kind, who, last):
    (folder / "fired").unlink(missing_ok=True)
    ended = train(forks, folder, kind, FAULT=kind, WHO=str(who))
    assert (folder / "fired").exists()
    assert [p.code for p in ended] == [70, 70], ended
    assert f"the {kind} is broken" in ended[who].output and "Traceback" not in ended[1 - who].output
    assert f"process {who} cannot go on: " in ended[1 - who].output and f"the {kind} is broken" in ended[1 - who].output
    assert saved(folder, kind)[-1] == last, ended
    assert max(p.seconds for p in ended) < 15
    if kind == "hook":
        return  # 3 s less: what is saved is of the same step and the same way
    again = train(forks, folder, kind)
    assert [p.code for p in again] == [0, 0], again
    # An evaluation that ended the run is not made again: its step is done.
    assert losses(folder, kind) == {at: x for at, x in losses(folder, "clean").items() if at != (last, "eval")}
