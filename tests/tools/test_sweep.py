"""`spmdkit sweep` and `sk.sweep`: a process per combination, checked before the first one, one table and one page."""

import json
import subprocess

import pytest

import spmdkit as sk
from spmdkit import cli
from spmdkit.errors import ConfigError
from spmdkit.tools import sweep as sweeps

TASK = """
import jax.numpy as jnp, numpy as np, optax
import spmdkit as sk
x = np.linspace(-1, 1, 64 * 4, dtype=np.float32).reshape(64, 4)
data = {"x": x, "y": x.sum(1)}
loss = lambda params, batch, key: sk.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
task = sk.Task(lambda key: {"w": jnp.zeros(4)}, loss, optax.sgd, data, data)
"""
CONFIG = "task: task.py:task\nsteps: 4\nbatch_size: 16\ndevices: cpu:2\nlearning_rate: 0.1\nlog: {every_steps: 2}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def no_process(*_, **__):
    raise AssertionError("a process is started")


@pytest.mark.processes
def test_a_sweep_trains_each_combination_once(folder, capfd, monkeypatch):
    overrides = ["learning_rate=0.1,0.2", "epochs=2", "steps=null"]
    assert cli.main(["sweep", "run.yaml", *overrides, "--max-parallel", "2"]) == 0
    out = capfd.readouterr().out.splitlines()
    assert out[0].split() == ["learning_rate", "exit_code", "step", "loss", "eval/loss"] and len(out) == 4, out
    assert [line.split()[0] for line in out[1:3]] == ["0.1", "0.2"], "no insignificant zeros"
    directory = folder / "runs" / "run_sweep"
    assert out[-1] == str(directory / "sweep.html") and "learning_rate=0.2" in (directory / "sweep.html").read_text()
    rows = json.loads((directory / "sweep.json").read_text())
    assert [(row["learning_rate"], row["step"], row["exit_code"]) for row in rows] == [(0.1, 8, 0), (0.2, 8, 0)]
    assert rows[0]["loss"] > rows[1]["loss"] and rows[0]["run_dir"] == str(directory / "learning_rate=0.1")
    assert "step 8/8" in (directory / "logs" / "learning_rate=0.2.txt").read_text()
    monkeypatch.setattr(subprocess, "Popen", no_process)
    again = sk.sweep("run.yaml", {"learning_rate": [0.1, 0.2], "epochs": [2], "steps": [None]})
    assert again == rows, "finished runs are read"
    with pytest.raises(AssertionError, match="a process is started"):
        sk.sweep("run.yaml", {"learning_rate": [0.1, 0.2], "epochs": [3], "steps": [None]})


BAD = {
    "an invalid value": ({"learning_rate": [0.1, "fast"]}, "learning_rate: should be a number"),
    "an invalid combination": ({"mesh.data": [2, 3]}, "batch_size: is 16; the mesh splits a batch into data"),
    "an unknown key": ({"leraning_rate": [0.1]}, "leraning_rate: unknown key"),
    "no values": ({"seed": []}, "needs KEY=VALUES, with values by commas"),
    "too many": ({"seed": range(100), "steps": range(1, 100)}, "sweep of 9900 runs: at most 1000"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_combination_starts_no_process(name, folder, monkeypatch):
    values, message = BAD[name]
    monkeypatch.setattr(subprocess, "Popen", no_process)
    with pytest.raises(ConfigError, match=message):
        sk.sweep("run.yaml", values)
    assert not (folder / "runs").exists()


def test_values_and_names_of_runs(folder):
    texts = ["learning_rate=1e-3,3e-3", "mesh={data: 2},{fsdp: 2}", "task_args.x=[1, 2],null", "steps=3"]
    runs = list(sweeps._runs(folder / "run.yaml", [sweeps._values(text) for text in texts]))
    assert len(runs) == 8 and len({run.directory for run in runs}) == 8
    assert runs[0].settings == {"learning_rate": 1e-3, "mesh": {"data": 2}, "task_args.x": [1, 2]}
    assert all(run.config.steps == 3 for run in runs) and runs[-1].config.mesh.sizes() == {"fsdp": 2}
    assert runs[0].directory.name.startswith("learning_rate=0.001,mesh=__data___2_,task_args.x=_1,_2_-")
    (long,) = sweeps._runs(folder / "run.yaml", [("task_args.text", ["a" * 300])])
    assert long.directory.name == "run"
    first, second = sweeps._runs(folder / "run.yaml", [("task_args.text", ["a" * 300, "b" * 300])])
    assert len(first.directory.name) <= 100 and first.directory != second.directory


def test_a_config_without_a_file_needs_a_task_in_one(folder):
    with pytest.raises(ConfigError, match="names no task that a process can import"):
        sk.sweep(sk.Config(steps=3), {"seed": [0, 1]})
    file = sweeps._file_of(sk.Config(task="task.py:task", steps=3))
    assert file == folder / "runs" / "run_sweep" / "config.yaml" and f"{folder}/task.py:task" in file.read_text()
