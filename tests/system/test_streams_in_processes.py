"""A job on a stream loses a process, and continues on fewer with the same examples: from a checkpoint, and from the
memory of the other processes."""

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
    if step == 13 and run.cluster.num_processes in (2, 4) and run.cluster.process_index == 1:
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
batch_size: 24
steps: 24
devices: cpu:2
mesh: {data: -1}
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns the folder of the task, and the metrics of an uninterrupted run in one process."""
    folder = tmp_path_factory.mktemp("streams")
    (folder / "task.py").write_text(TASK)
    (folder / "run.yaml").write_text(CONFIG)
    code, output = run(folder, "train", "run.yaml", "run_dir=whole")
    assert code == 0, output
    return folder, metrics(folder / "whole")


def test_from_a_checkpoint(whole):
    folder, wanted = whole
    code, output = run(folder, "launch", "-n", "2", "--", "train", "run.yaml", "run_dir=killed")
    assert code == 137, output
    saved = [int(path.name) for path in (folder / "killed/checkpoints").iterdir() if path.name.isdigit()]
    assert saved, output
    code, output = run(folder, "train", "run.yaml", "run_dir=killed")
    assert code == 0 and f"continuing at step {max(saved) + 1}" in output, output
    assert metrics(folder / "killed") == wanted


def test_from_the_memory_of_the_other_processes(whole):
    folder, wanted = whole
    launch = ["launch", "-n", "4", "--max-restarts", "1", "--elastic", "3:4", "--"]
    elastic = ["devices=cpu:4", "elastic.in_process=true", "elastic.snapshot_every=3", "checkpoint.every_steps=100"]
    code, output = run(folder, *launch, "train", "run.yaml", "run_dir=elastic", *elastic)
    assert code == 0 and "starting all processes again" not in output, output
    assert metrics(folder / "elastic") == wanted
