"""The job that every engine runs: y = 2x on two processes, forty steps, the same numbers however it is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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

DIES = TASK.replace(
    "task = sk.Task(",
    """
import os, pathlib, time

def die(run, step, state, metrics):
    mark = pathlib.Path(__file__).with_name("died")
    if step == 26 and run.cluster.process_index == 1 and not mark.exists():
        while not (run.directory / "checkpoints" / "20").exists():
            time.sleep(0.05)
        mark.touch()
        os.kill(os.getpid(), 9)

task = sk.Task(""",
).replace("train_data=", "hooks=[sk.Hook(name='dies', after_step=die, every=1)], train_data=")
"""Process 1 dies once by SIGKILL, six steps after the first checkpoint."""

SLOWLY = TASK.replace("import jax", "import time\nimport jax", 1).replace(
    "train_data=", "hooks=[sk.Hook(name='slow', after_step=lambda *_: time.sleep(0.2), every=1)], train_data="
)

THREE = ("devices=cpu:3", "mesh.data=3", "batch_size=15", "checkpoint={every_seconds: 5}")
"""What makes it the job of the first text: three processes, saved every five seconds."""

DIES_WHEN_SAVED = SLOWLY.replace(
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


def project(folder: Path) -> Path:
    """Writes the project into a folder, and returns it."""
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(TASK)
    (folder / "run.yaml").write_text(CONFIG)
    return folder


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
