"""Whole runs as a user starts them: real processes, a task file and a config in a separate folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.environment import environment_of_a_user
from tests.support.forks import Child, Forks, Process

TASK = '''
import time
import jax
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

@sk.task
def task(width=32, pause_s=0.0):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 8)).astype(np.float32)
    y = np.sin(x.sum(1)).astype(np.float32)

    class Slow:
        """Examples one by one, each after a pause, so that a test can hit the middle of a run."""
        def __len__(self):
            return len(x)
        def __getitem__(self, i):
            time.sleep(pause_s)
            return {"x": x[i], "y": y[i]}

    def init(key):
        a, b = jax.random.split(key)
        return {"w": jax.random.normal(a, (8, width)) / 3, "b": jnp.zeros(width), "v": jax.random.normal(b, (width,)) / 6}

    def loss_fn(params, batch, key):
        h = jnp.tanh(batch["x"] @ params["w"] + params["b"])
        if key is not None:
            h = h * jax.vmap(lambda k: jax.random.bernoulli(k, 0.9, (width,)))(sk.example_keys())
        error = h @ params["v"] - batch["y"]
        return sk.mean(error**2), {"absolute_error": sk.mean(jnp.abs(error))}

    data = Slow() if pause_s else {"x": x, "y": y}
    return sk.Task(init, loss_fn, optax.adam(1e-2), train_data=data, eval_data={"x": x[:101], "y": y[:101]})
'''  # noqa: E501

CONFIG = """
task: task.py:task
run_dir: run
steps: 60
batch_size: 32
devices: cpu:4
mesh: {data: -1}
checkpoint: {every_steps: 10}
eval: {every_steps: 30}
log: {every_steps: 5}
"""

TIMES = ("examples_per_s", "step_time_s", "input_wait_s")


class Folder:
    """A folder with `task.py` and `run.yaml`, and the commands that a user types in it.

    With `forks`, a command and what it launches are forked, which saves the two seconds of each import.
    """

    def __init__(self, path: Path, forks: Forks | None):
        self.path, self._forks = path, forks
        (path / "task.py").write_text(TASK)
        (path / "run.yaml").write_text(CONFIG)

    def start(self, *arguments: str) -> subprocess.Popen[str] | Child:
        """Starts a command in a new process group."""
        if self._forks is not None:
            forks = arguments[0] == "launch"
            return self._forks.start(Process(list(arguments), self.path, environment_of_a_user(), forks=forks))
        return subprocess.Popen(
            [sys.executable, "-m", "spmdkit", *arguments],
            cwd=self.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=environment_of_a_user(),
        )

    def run(self, *arguments: str, timeout_s: float = 120) -> tuple[int, str]:
        """Returns (exit code, output) of a command that ends by itself."""
        child = self.start(*arguments)
        try:
            output, _ = child.communicate(timeout=timeout_s)
        finally:
            end(child)
        return code_of(child), output

    def train(self, *overrides: str, processes: int = 1, timeout_s: float = 120) -> tuple[int, str]:
        """Returns (exit code, output) of a training; of several processes, those of process 0."""
        command = ["train", "run.yaml", *overrides]
        if processes == 1:
            return self.run(*command, timeout_s=timeout_s)
        assert self._forks is not None
        ended = self._forks.together([Process(command, self.path, environment_of_a_user())] * processes, timeout_s)
        assert len({process.code for process in ended}) == 1, ended
        return ended[0].code, ended[0].output

    def events(self, run: str = "run") -> list[dict[str, Any]]:
        """Returns the lines of events.jsonl."""
        return [json.loads(line) for line in (self.path / run / "events.jsonl").read_text().splitlines()]

    def metrics(self, run: str = "run") -> list[dict[str, Any]]:
        """Returns the lines of metrics.jsonl without measured times."""
        lines = (self.path / run / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]

    def params(self, run: str = "run") -> dict[str, np.ndarray]:
        """Returns the parameters of the newest checkpoint."""
        from safetensors.numpy import load_file

        from spmdkit import checkpoint

        out = self.path / f"{run.replace('/', '_')}.safetensors"
        out.unlink(missing_ok=True)
        checkpoint.export(self.path / run / "checkpoints", None, out)
        return load_file(out)

    def assert_equals(self, other: Folder, run: str = "run", tolerance: float = 0.0, of: str = "run") -> None:
        """Asserts that the parameters and losses of two runs are equal: bitwise, or within a relative tolerance."""
        ours, theirs = self.params(run), other.params(of)
        assert ours.keys() == theirs.keys()
        for name, x in theirs.items():
            distance = np.linalg.norm(ours[name] - x) / np.linalg.norm(x)
            assert ours[name].tobytes() == x.tobytes() if not tolerance else distance < tolerance, (name, distance)
        losses = [
            {(line["step"], line.get("split")): line["loss"] for line in folder.metrics(name)}
            for folder, name in ((self, run), (other, of))
        ]
        assert losses[0] == (pytest.approx(losses[1], rel=tolerance) if tolerance else losses[1])


def code_of(child: subprocess.Popen[str] | Child) -> int:
    """Returns the exit code as a shell shows it: 128 + n for signal n."""
    assert child.returncode is not None
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def end(child: subprocess.Popen[str] | Child) -> None:
    """Kills the process group of a child."""
    if isinstance(child, Child):
        return child.end()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait(timeout=30)
    if child.stdout is not None:
        child.stdout.close()


def wait_until(condition: Any, timeout_s: float = 60, every_s: float = 0.002) -> None:
    """Returns when `condition()` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition} never came true")
        time.sleep(every_s)


@pytest.fixture
def folder(tmp_path: Path, forks: Forks) -> Folder:
    return Folder(tmp_path, forks)


@pytest.fixture
def real_folder(tmp_path: Path) -> Folder:
    """A folder whose commands start a new Python each."""
    return Folder(tmp_path, None)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Folder:
    """A folder with a run without a fault."""
    clean = Folder(tmp_path_factory.mktemp("undisturbed"), forks)
    code, output = clean.train()
    assert code == 0, output
    return clean


@pytest.fixture
def helpers() -> Any:
    """The functions of this file for tests: `wait_until`, `end`, `code_of`."""
    import types

    return types.SimpleNamespace(wait_until=wait_until, end=end, code_of=code_of)
