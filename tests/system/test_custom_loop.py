"""A custom loop (`sk.build`, `program.batches`, `program.step`) in several processes is one job."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.environment import environment_of_a_user
from tests.support.forks import Process
from tests.support.messages import assert_parts

pytestmark = pytest.mark.processes

TASK = """
import dataclasses
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

x = np.arange(32, dtype=np.float32).reshape(16, 2) / 16
task = sk.Task(
    lambda key: {"w": jnp.array([1.0, -2.0])},
    lambda params, batch, key: sk.mean((batch["x"] @ params["w"] - batch["y"]) ** 2),
    optax.sgd(0.1),
    train_data={"x": x, "y": x.sum(1)},
)

class Noisy:
    def __len__(self):
        return 16
    def __getitem__(self, i):
        return {"x": x[i] + np.random.normal(size=2).astype(np.float32), "y": x[i].sum()}

noisy = dataclasses.replace(task, train_data=Noisy())
"""

CONFIG = """
task: task.py:task
steps: 3
batch_size: 8
devices: cpu:2
mesh: {data: 2}
"""

LOOP = """
import sys
import spmdkit as sk

program = sk.build("run.yaml", overrides=sys.argv[1:])
state = program.init()
for step, batch in program.batches():
    state, metrics = program.step(state, batch)
import jax
print("processes", jax.process_count(), "loss", float(metrics["loss"]))
"""

FOREIGN_DEVICES = """
import sys
import jax
import spmdkit as sk
from spmdkit.faults import run_process

sys.exit(run_process(lambda: sk.build("run.yaml", devices=jax.devices("cpu")[:1], overrides=["mesh={data: 1}"]) and 0))
"""


@pytest.fixture
def folder(tmp_path):
    for name, text in {"task.py": TASK, "run.yaml": CONFIG, "loop.py": LOOP, "foreign.py": FOREIGN_DEVICES}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


LAUNCH = ["launch", "-n", "2", "--"]


def test_custom_loop_joins_the_launched_processes(folder, forks):
    """Each process starts its own Python, whose exit ends the job."""
    done = subprocess.run(
        [sys.executable, "-m", "spmdkit", *LAUNCH, "loop.py"],
        cwd=folder,
        env=environment_of_a_user() | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (alone,) = forks.run([Process(["loop.py"], folder)])
    loss = alone.output.split("loss ")[1].strip()
    lines = sorted(line for line in done.stdout.splitlines() if "processes" in line)
    assert lines == [f"[{process}] processes 2 loss {loss}" for process in (0, 1)]


def test_separate_models_in_one_job_are_rejected(folder, forks):
    (ended,) = forks.run([Process([*LAUNCH, "foreign.py"], folder, forks=True)])
    assert ended.code == 78, ended.output
    parts = {"found": "JAX has joined 1", "repair": "cluster: {environment: none}"}
    assert_parts(ended.output, "the job has 2 processes", **parts)


def test_processes_reject_different_contents_of_shared_rows(folder, forks):
    noisy = ["train", "run.yaml", "task=task.py:noisy", "checkpoint=null"]
    shared = [*noisy, "mesh={tensor: 2}", "layout={rules: [[w, [tensor]]]}"]
    refused, _ = forks.together([Process(shared, folder)] * 2)
    assert refused.code == 78, refused.output
    parts = {"found": "several of the 2 processes hold the same rows", "repair": "np.random.default_rng(i)"}
    assert_parts(refused.output, "train_data: rows differ each time they are read", **parts)
    ended = forks.together([Process(noisy, folder)] * 2)  # each process has its own rows
    assert [process.code for process in ended] == [0, 0], ended
    assert sum(process.output.count("a resumed run is not bitwise identical") for process in ended) == 1
