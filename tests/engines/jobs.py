"""The job that every engine runs: y = 2x on two processes, forty steps, the same numbers however it is started."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import spmdkit as sk
from spmdkit.cluster import detect_cluster, join
from tests.support.environment import environment_of_a_user

TASK = """
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
loss = lambda params, batch, key: sk.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)
init = lambda key: {"w": jnp.zeros((1, 1)), "b": jnp.ones(())}
task = sk.Task(init, loss, optax.adam(0.1), train_data={"x": x, "y": 2 * x})
"""

CONFIG = """
task: task.py:task
run_dir: run
steps: 40
batch_size: 16
devices: cpu:2
mesh: {data: 2}
checkpoint: {every_steps: 20}
log: {every_steps: 1, progress: plain}
"""

SLOWLY = TASK.replace("import jax", "import time\nimport jax", 1).replace(
    "train_data=", "hooks=[sk.Hook(name='slow', after_step=lambda *_: time.sleep(0.2), every=1)], train_data="
)

THREE = ("devices=cpu:3", "mesh.data=3", "batch_size=15", "checkpoint={every_seconds: 5}")
"""What makes it the job of the first text: three processes, saved every five seconds."""

DIES = SLOWLY.replace(
    "task = sk.Task(",
    """
import os, pathlib

def die(run, step, state, metrics):
    time.sleep(0.2)
    mark = pathlib.Path(__file__).with_name("died")
    saved = run.directory / "checkpoints"
    if run.cluster.process_index == 1 and not mark.exists() and any(path.name.isdigit() for path in saved.iterdir()):
        mark.touch()
        os.kill(os.getpid(), 9)

task = sk.Task(""",
).replace("lambda *_: time.sleep(0.2)", "die")
"""Process 1 dies once by SIGKILL, as soon as there is a checkpoint."""

REPOSITORY = Path(__file__).parents[2]


def project(folder: Path, task: str = TASK) -> Path:
    """Writes the project into a folder, and returns it."""
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(task)
    (folder / "run.yaml").write_text(CONFIG)
    return folder


def launch(on: str, num: int, *settings: str, restarts: int = 0, train: Sequence[str] = ()) -> list[str]:
    """Returns the words of `spmdkit launch --on` for a project."""
    options = [word for text in settings for word in ("--set", text)]
    own = ["--on", on, "-n", str(num), "--name", "run", "--max-restarts", str(restarts), *options]
    return [sys.executable, "-m", "spmdkit", "launch", *own, "--", "train", "run.yaml", *train]


def wait_for_steps(folder: Path, lives: Callable[[], bool], limit_s: float = 90) -> None:
    """Returns when the run in a project has logged two steps."""
    end = time.monotonic() + limit_s
    while not (folder / "run/metrics.jsonl").is_file() or len(losses(folder)) < 2:
        assert time.monotonic() < end and lives(), list(folder.iterdir())
        time.sleep(0.1)


def assert_all_saved(folder: Path) -> None:
    """Asserts that the newest checkpoint is of the step at which the run was preempted."""
    steps = [int(path.name) for path in (folder / "run/checkpoints").iterdir() if path.name.isdigit()]
    assert max(steps) == max(event["step"] for event in events(folder, "preempted"))


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of somebody who has started nothing yet, with this repository's spmdkit."""
    ours = ("SLURM_", "OMPI_", "PMIX_", "JOBSET_", "JOB_", "TPU_", "MEGASCALE_", "RAY_", "TF_CONFIG")
    clean = {k: v for k, v in environment_of_a_user().items() if not k.startswith(ours)}
    return clean | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"} | more


def losses(folder: Path, name: str = "metrics.jsonl") -> list[float]:
    """Returns the losses of the run in a project, in order of steps."""
    lines = [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]
    return [line["loss"] for line in lines if line.get("split") != "eval"]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def alone(folder: Path) -> list[float]:
    """Returns the losses of the same job on two devices of this process."""
    config = sk.load_config(project(folder) / "run.yaml")
    with contextlib.chdir(folder):
        sk.train(config, join(detect_cluster({}), config.devices))
    return losses(folder)


def local(folder: Path, num: int = 2, *overrides: str) -> list[float]:
    """Returns the losses of the same job by `spmdkit launch`."""
    project(folder)
    command = [sys.executable, "-m", "spmdkit", "launch", "-n", str(num), "--", "train", "run.yaml", *overrides]
    ended = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return losses(folder)


def on_path(**more: str) -> dict[str, str]:
    """Returns `environment` with this Python first on the PATH, as `python`."""
    return environment(PATH=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", **more)
