"""A job and drills of it: real processes, forked where the start does not matter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environment import environment_of_a_user
from tests.support.forks import Forks, Process
from tests.support.leftover_files import leftover_files

REPOSITORY = Path(__file__).resolve().parents[3]

TASK = """
import time
import jax
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

@sk.task
def task(pause_s=0.01):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(128, 8)).astype(np.float32)

    def init(key):
        return {"w": jax.random.normal(key, (8, 64)) / 3, "v": jnp.zeros(64)}

    def loss_fn(params, batch, key):
        h = jnp.tanh(batch["x"] @ params["w"])
        if key is not None:
            h = h * jax.vmap(lambda k: jax.random.bernoulli(k, 0.9, (64,)))(sk.example_keys())
        return sk.mean((h @ params["v"] - batch["y"]) ** 2)

    pause = sk.Hook("pause", before_step=lambda run, step, state: time.sleep(pause_s))
    return sk.Task(init, loss_fn, optax.adam(1e-2), train_data={"x": x, "y": np.sin(x.sum(1))}, hooks=[pause])
"""

CONFIG = """
task: task.py:task
run_dir: run
steps: 60
batch_size: 16
devices: cpu:2
mesh: {data: -1}
checkpoint: {every_steps: 5, every_seconds: null}
log: {every_steps: 5, progress: plain}
"""


class Drills:
    """A folder with a job, and its drills."""

    def __init__(self, path: Path, forks: Forks):
        self.path, self._forks = path, forks
        (path / "task.py").write_text(TASK)
        (path / "run.yaml").write_text(CONFIG)
        self._temporary = path / "temporary"
        self._temporary.mkdir()

    def leftover_files(self) -> list[str]:
        """Returns the files that the drills left outside their folders."""
        return leftover_files(self.path, self._temporary, ["task.py", "run.yaml", "run_drill", "cache", "__pycache__"])

    def run(self, *arguments: str, timeout_s: float = 240, cache: str = "off") -> tuple[int, str]:
        """Returns (exit code, output) of `spmdkit drill run.yaml ARGUMENTS`, all of whose processes are forked.
        `cache`: a folder for compiled programs."""
        variables = {"SPMDKIT_COMPILE_CACHE": cache, "TMPDIR": str(self._temporary)}
        process = Process(["drill", "run.yaml", *arguments], self.path, variables, forks=True)
        (ended,) = self._forks.run([process], timeout_s)
        return ended.code, ended.output

    def result(self, number: int = 1) -> dict:
        """Returns drill.json of a drill."""
        return json.loads((self.path / "run_drill" / str(number) / "drill.json").read_text())

    def by_command(self, *arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess:
        """Runs a drill by the command line."""
        return subprocess.run(
            [sys.executable, "-m", "spmdkit", "drill", "run.yaml", *arguments],
            cwd=self.path,
            env=environment_of_a_user()
            | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "TMPDIR": str(self._temporary)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )


@pytest.fixture
def drills(tmp_path, forks):
    return Drills(tmp_path, forks)
