"""A restart compiles nothing again: read from the run's own events, in this process and in two that were killed."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.support.environment import environment_of_a_user
from tests.support.small_runs import events, lines, train

pytestmark = pytest.mark.compiles


def of_one_start(folder, **changes):
    """Returns the `compiled` events that a start adds."""
    before = len(events(folder, "compiled")) if (folder / "run").is_dir() else 0
    jax.clear_caches()
    train(folder, compile_cache={"min_s": 0.0, **changes.pop("cache", {})}, **changes)
    return events(folder, "compiled")[before:]


def test_restart_compiles_nothing_and_computes_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMDKIT_COMPILE_CACHE", str(tmp_path / "cache"))
    # From one line: that of the caller is part of a program's key.
    first, last = (of_one_start(tmp_path, steps=steps) for steps in (10, 20))
    assert "train_step" in first[-1]["compiled"] and first[0]["from_cache"] == []
    assert "train_step" in last[0]["from_cache"] and "train_step" not in last[0]["compiled"]
    assert last[0]["cache"].startswith(str(tmp_path / "cache"))
    (tmp_path / "off").mkdir()
    assert of_one_start(tmp_path / "off", cache={"directory": str(tmp_path / "other")})[-1]["compiled"]
    trained = lambda folder: [line["loss"] for line in lines(folder, "metrics.jsonl") if "split" not in line]
    assert trained(tmp_path) == trained(tmp_path / "off") and len(trained(tmp_path)) == 5
    plans = [json.loads((tmp_path / name / "run/plan.json").read_text()) for name in (".", "off")]
    assert plans[0]["collectives"] == plans[1]["collectives"], "of a program from the cache the same is read"


@pytest.mark.slow
def test_folder_open_to_others_is_not_used(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SPMDKIT_COMPILE_CACHE")
    (tmp_path / "open").mkdir(mode=0o755)
    (event, _) = of_one_start(tmp_path, cache={"directory": str(tmp_path / "open")})
    assert "(mode 75" in event["cache"] and "from_cache" not in event
    assert "note: compile cache off: " in capsys.readouterr().out


TASK = """
import os, pathlib
import jax.numpy as jnp, numpy as np, optax
import spmdkit as sk

mark = pathlib.Path(__file__).with_name("died")

def after_step(run, step, state, metrics):
    if step == 4 and run.cluster.process_index == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)

x = np.arange(32, dtype=np.float32).reshape(16, 2) / 16
loss = lambda w, batch, key: sk.mean((batch @ w - 1) ** 2)
task = sk.Task(lambda key: jnp.zeros(2), loss, optax.sgd(0.1), train_data=x, hooks=[sk.Hook(name="dies", after_step=after_step, every=1)])
"""  # noqa: E501

CONFIG = """
task: task.py:task
steps: 6
batch_size: 8
devices: cpu:2
mesh: {data: 2}
checkpoint: {every_steps: 2}
compile_cache: {min_s: 0.0}
log: {every_steps: 1, progress: plain}
"""


@pytest.mark.slow
@pytest.mark.processes
def test_restarted_processes_take_the_step_from_cache(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG)
    env = environment_of_a_user() | {"SPMDKIT_COMPILE_CACHE": str(tmp_path / "cache")}
    launch = "-m spmdkit launch -n 2 --max-restarts 2 -- train run.yaml run_dir=run"
    command = [sys.executable, *launch.split()]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = {process: [e for e in events(tmp_path, "compiled") if e["process"] == process] for process in (0, 1)}
    for process, (first, again, *_) in found.items():
        assert "train_step" in first["compiled"], process
        assert "train_step" in again["from_cache"] and "train_step" not in again["compiled"], process
    assert (os.stat(tmp_path / "cache").st_mode & 0o777) == 0o700
    assert np.isfinite(lines(tmp_path, "metrics.jsonl")[-1]["loss"])
