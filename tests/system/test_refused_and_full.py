"""What is refused before anything is computed, and metrics that do not fit any more: real processes, their codes and no
traceback."""

import pytest

from tests.support.forks import Process

pytestmark = pytest.mark.processes

TASK = """
import resource
from pathlib import Path
import jax.numpy as jnp, numpy as np, optax, spmdkit as sk

@sk.hook
def full():
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    def after_step(run, step, state, metrics):  # no file grows much beyond what metrics.jsonl has after some 200 lines
        size = Path("run/metrics.jsonl").stat().st_size
        if size > 20_000 and resource.getrlimit(resource.RLIMIT_FSIZE)[0] == limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limit))
    return sk.Hook("full", after_step=after_step)

x = np.ones((64, 3), np.float32)
task = sk.Task(lambda key: {"w": jnp.zeros(3)}, lambda p, b, key: sk.mean(b @ p["w"]), optax.sgd(0.1), train_data=x)
"""
CONFIG = """
task: task.py:task
run_dir: run
steps: 2000
batch_size: 8
devices: cpu:1
checkpoint: null
log: {every_steps: 1, progress: 'off'}
"""


@pytest.fixture
def train(forks, tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return lambda *overrides: forks.run([Process(["train", "run.yaml", *overrides], tmp_path)])[0]


@pytest.mark.slow
def test_4096_devices_for_a_small_batch_are_refused(train, tmp_path):
    ended = train("devices=cpu:4096", "mesh={data: -1}")
    assert ended.code == 78, ended
    assert (
        "batch_size: is 8; the mesh splits a batch into data(4096)" in ended.output and "Traceback" not in ended.output
    )
    assert not (tmp_path / "run").exists()


def test_full_disk_for_metrics_is_74(train, tmp_path):
    ended = train("hooks=[task.py:full]")
    assert ended.code == 74 and "metrics.jsonl" in ended.output, ended
    assert "Traceback" not in ended.output and len(ended.output.splitlines()) < 12
