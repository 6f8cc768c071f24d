"""One run in one directory that all its processes see: a second one never gets in, and a superseded one writes nothing
more."""

from __future__ import annotations

import json

import pytest

from tests.support.forks import Process

pytestmark = pytest.mark.processes

TASK = """
import os, pathlib, time
import jax.numpy as jnp
import spmdkit as sk
import optax

RUN = pathlib.Path(__file__).parent / "run"

def wait_for(num_lines):
    path, deadline = RUN / "metrics.jsonl", time.monotonic() + 30
    while not path.is_file() or path.read_text().count("\\n") < num_lines:
        assert time.monotonic() < deadline
        time.sleep(0.01)

if os.environ.get("INTRUDER") == "removes the lock":
    wait_for(3)
    (RUN / "run.lock").unlink()
if os.environ.get("INTRUDER") == "moves the directory":
    wait_for(3)
    RUN.rename(RUN.with_name("moved"))

class Slow:
    def __len__(self):
        return 64
    def __getitem__(self, i):
        time.sleep(float(os.environ.get("PAUSE_S", 0)))
        return {"x": float(i)}

def loss_fn(params, batch, key):
    return sk.mean((params["w"] * batch["x"] / 64 - 1) ** 2)

task = sk.Task(lambda key: {"w": jnp.zeros(())}, loss_fn, optax.sgd(0.1), train_data=Slow())
"""

CONFIG = """
task: task.py:task
run_dir: run
batch_size: 8
devices: cpu:1
log: {every_steps: 1}
checkpoint: {every_steps: 5}
"""


def project(folder, devices=1):
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(TASK)
    (folder / "run.yaml").write_text(CONFIG.replace("cpu:1", f"cpu:{devices}"))
    return folder


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def two_runs(forks, folder, intruder, steps=60):
    """Returns how a run ended, and one that starts while it is in its first steps and does what `intruder` says
    before."""
    begin = ["train", "run.yaml"]
    return forks.run(
        [
            Process([*begin, f"steps={steps}", "checkpoint.max_failures=100"], folder, {"PAUSE_S": "0.005"}),
            Process([*begin, "steps=12"], folder, {"INTRUDER": intruder}),
        ]
    )


def test_removed_lock_file_keeps_second_run_out(forks, tmp_path):
    folder = project(tmp_path)
    first, second = two_runs(forks, folder, "removes the lock")
    assert (first.code, second.code) == (0, 78), (first, second)
    assert "is in use by process" in second.output
    assert [line["step"] for line in lines(folder / "run" / "metrics.jsonl")] == list(range(1, 61))


def test_run_with_moved_directory_writes_nothing_more(forks, tmp_path):
    folder = project(tmp_path)
    first, second = two_runs(forks, folder, "moves the directory", steps=400)
    assert (first.code, second.code) == (78, 0), (first, second)
    assert "another run" in first.output and "Traceback" not in first.output
    assert [line["step"] for line in lines(folder / "run" / "metrics.jsonl")] == list(range(1, 13))
    assert {p.name for p in (folder / "run" / "checkpoints").iterdir()} == {"5", "10", "12"}
    assert [e["event"] for e in lines(folder / "run" / "events.jsonl")].count("started") == 1
    assert "fault" not in {e["event"] for e in lines(folder / "run" / "events.jsonl")}


@pytest.mark.slow
def test_hosts_without_shared_disk_are_refused(forks, tmp_path):
    hosts = [project(tmp_path / name, devices=2) for name in ("a", "b")]
    ended = forks.together([Process(["train", "run.yaml", "mesh.data=2", "steps=2"], host) for host in hosts])
    assert [process.code for process in ended] == [78, 78], ended
    for process in ended:
        assert "run directory" in process.output and "process 1" in process.output and str(hosts[1]) in process.output
        assert "Set run_dir" in process.output and "Traceback" not in process.output
