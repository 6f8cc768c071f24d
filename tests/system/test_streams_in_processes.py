"""A job on a stream loses a process, and continues on another number with the same examples: from a checkpoint, and
from the memory of the other processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.environment import environment_of_a_user
from tests.support.jobs import REPOSITORY
from tests.support.libraries import LIBRARIES

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TASK = """
import os, pathlib, signal
import jax.numpy as jnp
import optax
import spmdkit as sk
from tests.support.libraries import LIBRARIES
from tests.support.streams import exact

STEPS = {1: 6, 2: 12, 4: 18}

def kill(run, step, state, metrics):
    size = run.cluster.num_processes
    if step == STEPS.get(size) and run.cluster.process_index == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)

@sk.task
def task(kind="", killed=True):
    data = LIBRARIES[kind][1](pathlib.Path(__file__).parent / "data") if kind else exact

    def loss_fn(params, batch, key):
        sums = {"total": sk.sum(batch["id"] % 1000), "squares": sk.sum((batch["id"] % 97) ** 2)}
        return sk.mean((params["w"] * batch["x"].sum(-1) / 1000 - 1) ** 2), sums

    hooks = [sk.Hook("kill", after_step=kill, on="all")] if killed else []
    return sk.Task(lambda key: {"w": jnp.zeros(())}, loss_fn, optax.adam(0.01), train_data=data, hooks=hooks)
"""

CONFIG = """
task: task.py:task
batch_size: 24
steps: 24
devices: cpu:4
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


@pytest.fixture
def whole(tmp_path):
    """Returns a function: (kind of stream) -> (overrides, the metrics of an uninterrupted run in one process)."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "data").mkdir()

    def train(kind=""):
        if kind:
            pytest.importorskip(LIBRARIES[kind][0])
            LIBRARIES[kind][1](tmp_path / "data")  # writes the files
        overrides = [f"task_args.kind={kind!r}"]
        code, output = run(tmp_path, "train", "run.yaml", "run_dir=whole", "task_args.killed=false", *overrides)
        assert code == 0, output
        return overrides, metrics(tmp_path / "whole")

    return train


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("kind", ["", "grain, mix and filter", "hf, map and filter", "torchdata"])
@pytest.mark.parametrize("workers", [0, 2])
def test_from_checkpoints_on_1_2_4_1_processes(whole, tmp_path, kind, workers):
    overrides, wanted = whole(kind)
    sizes = [([], -9), (["launch", "-n", "2", "--"], 137), (["launch", "-n", "4", "--"], 137), ([], 0)]
    for size, wanted_code in sizes:
        saved = [int(path.name) for path in tmp_path.glob("killed/checkpoints/[0-9]*") if path.name.isdigit()]
        command = [*size, "train", "run.yaml", "run_dir=killed", f"data.workers={workers}", *overrides]
        code, output = run(tmp_path, *command)
        assert not saved or f"continuing at step {max(saved) + 1}" in output, output
        assert code == wanted_code, output
    assert metrics(tmp_path / "killed") == wanted


def test_from_the_memory_of_the_other_processes(whole, tmp_path):
    overrides, wanted = whole()
    launch = ["launch", "-n", "4", "--max-restarts", "1", "--elastic", "3:4", "--"]
    elastic = ["elastic.in_process=true", "elastic.snapshot_every=3", "checkpoint.every_steps=100"]
    code, output = run(tmp_path, *launch, "train", "run.yaml", "run_dir=elastic", *elastic, *overrides)
    assert code == 0 and "starting all processes again" not in output, output
    assert metrics(tmp_path / "elastic") == wanted
