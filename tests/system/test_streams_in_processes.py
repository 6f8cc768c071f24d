"""A job on a stream is killed in two processes, and continues in one with the same examples."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.environment import environment_of_a_user
from tests.support.jobs import REPOSITORY

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TASK = """
import os, pathlib, signal
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

class Numbers:
    def __init__(self, shard, num_shards, seed):
        self.ids, self.next = np.random.default_rng((seed, shard)).permutation(50) + 1000 * shard, 0
    def __iter__(self):
        return self
    def __next__(self):
        if self.next == 50:
            raise StopIteration
        self.next += 1
        return {"id": np.float32(self.ids[self.next - 1])}
    def get_state(self):
        return {"next": self.next}
    def set_state(self, state):
        self.next = state["next"]

numbers = sk.stream(Numbers)

def kill(run, step, state, metrics):
    if step == 13 and run.cluster.num_processes == 2 and run.cluster.process_index == 1:
        run.report_saves()
        os.kill(os.getpid(), signal.SIGKILL)

@sk.task
def task():
    def loss_fn(params, batch, key):
        row = batch["id"] / 1000
        sums = {"total": sk.sum(batch["id"]), "squares": sk.sum((batch["id"] % 97) ** 2)}
        return sk.mean((params["w"] * row - 1) ** 2), sums

    return sk.Task(lambda key: {"w": jnp.zeros(())}, loss_fn, optax.adam(0.01), train_data=numbers,
                   hooks=[sk.Hook("kill", after_step=kill, on="all")])
"""

CONFIG = """
task: task.py:task
batch_size: 16
steps: 24
devices: cpu:2
mesh: {data: 2}
checkpoint: {every_steps: 5}
log: {every_steps: 1, progress: plain}
"""


def run(folder, *arguments):
    """Returns the exit code of `spmdkit ARGUMENTS` in a folder, and its output."""
    ended = subprocess.run(
        [sys.executable, "-m", "spmdkit", *arguments],
        cwd=folder,
        env=environment_of_a_user() | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    return ended.returncode, ended.stdout


def metrics(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: (line["total"], line["squares"]) for line in lines}


def test_killed_in_two_processes_and_continued_in_one(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG)
    code, output = run(tmp_path, "train", "run.yaml", "run_dir=whole")
    assert code == 0, output
    code, output = run(tmp_path, "launch", "-n", "2", "--", "train", "run.yaml", "run_dir=killed")
    assert code == 137, output
    saved = [int(path.name) for path in (tmp_path / "killed/checkpoints").iterdir() if path.name.isdigit()]
    assert saved, output
    code, output = run(tmp_path, "train", "run.yaml", "run_dir=killed")
    assert code == 0 and f"continuing at step {max(saved) + 1}" in output, output
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
