"""Changes between two starts of a run are reported in one table and in its events; those that change the examples are
rejected unless allowed by name."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.forks import Process

pytestmark = pytest.mark.processes

TASK = """
import os
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk
from net import predict

@sk.task
def task(scale=1.0):
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32) * float(os.environ.get("FACTOR", 1))

    def loss_fn(params, batch, key):
        return sk.mean((predict(params, batch["x"]) * scale - 1) ** 2)

    return sk.Task(lambda key: {"w": jnp.zeros(4)}, loss_fn, lambda rate: optax.sgd(rate), train_data={"x": x})
"""

CONFIG = """
task: task.py:task
task_args: {scale: 1.0}
run_dir: run
learning_rate: 0.1
batch_size: 16
devices: cpu:1
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory, forks):
    """A folder with a run of two steps."""
    tmp_path = tmp_path_factory.mktemp("project")
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "net.py").write_text("def predict(params, x):\n    return x @ params['w']\n")
    (tmp_path / "run.yaml").write_text(CONFIG)
    assert train(forks, tmp_path, "steps=2").code == 0
    return tmp_path


def train(forks, folder, *arguments, **variables):
    [ended] = forks.run([Process(["train", "run.yaml", *arguments], folder, variables)])
    return ended


def changes(folder):
    """Returns the changed keys in events.jsonl, of all starts."""
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return [change["key"] for event in events if event["event"] == "settings_changed" for change in event["changes"]]


def test_changed_settings_are_reported_rejected_or_allowed(forks, project):
    same = train(forks, project, "steps=2")
    assert same.code == 0 and "since step" not in same.output and changes(project) == []
    (project / "net.py").write_text("def predict(params, x):\n    return x @ params['w'] + 0\n")
    ended = train(forks, project, "steps=4", "learning_rate=0.5", "task_args.scale=2.0", "clip_norm=1.0")
    assert ended.code == 0, ended
    lines = ended.output.splitlines()
    [head] = [i for i, line in enumerate(lines) if "since step 2 was saved" in line]
    shown = {line.split()[0]: " ".join(line.split()) for line in lines[head + 1 : head + 6]}
    assert shown["learning_rate"] == "learning_rate 0.1 -> 0.5"
    assert shown["task_args.scale"] == "task_args.scale 1.0 -> 2.0"
    assert shown["clip_norm"] == "clip_norm null -> 1.0"
    assert shown["steps"] == "steps 2 -> 4"
    assert shown["net.py"].startswith("net.py text ")
    assert sorted(changes(project)) == ["clip_norm", "learning_rate", "net.py", "steps", "task_args.scale"]
    other = ["steps=5", "seed=7"]
    before = sorted(os.listdir(project / "run" / "checkpoints"))
    ended = train(forks, project, *other, FACTOR="2")
    assert ended.code == 78, ended
    assert "--allow-change seed --allow-change train_data" in ended.output and "Traceback" not in ended.output
    assert sorted(os.listdir(project / "run" / "checkpoints")) == before
    ended = train(forks, project, *other, "--allow-change", "seed", "--allow-change", "train_data", FACTOR="2")
    assert ended.code == 0, ended
    assert {"seed", "train_data"} <= set(changes(project))
    ended = train(forks, project, *other, FACTOR="2")
    assert ended.code == 0 and "already finished" in ended.output, "an allowed change is part of the run"


def test_unknown_key_of_allow_change_is_refused(forks, project):
    ended = train(forks, project, "--allow-change", "sed")
    assert ended.code == 78, ended
    assert "sed" in ended.output and "seed" in ended.output
