"""`spmdkit verify` as a user runs it: exit codes, JSON, table, and workers that die."""

import json
import re
import threading

import pytest

import spmdkit as sk
from spmdkit import cli
from spmdkit.config import load_config
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import name_axes
from spmdkit.verify import cases
from spmdkit.verify.pool import Pool, _Worker
from spmdkit.verify.report import VerifyOptions, verify_config

TASK = """
import os
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk
from jax import lax

@sk.task
def task(width=8, wrong=False, dies=False):
    x = np.linspace(-1, 1, 64 * 4, dtype=np.float32).reshape(64, 4)

    def loss_fn(params, batch, key):
        devices = lax.psum(1, ("replica", "data"))
        if dies and 1 < devices < 9:  # not in the analysis of rows, which has more replicas
            os.abort()
        print("a word of the user's, on standard output")
        error = jnp.tanh(batch["x"] @ params["w"]).sum(-1) - batch["x"].sum(-1)
        return sk.mean(error**2 * (devices if wrong else 1))

    init = lambda key: {"w": jnp.full((4, width), 0.1)}
    data = {"x": x}
    return sk.Task(init, loss_fn, optax.adam, train_data=data, eval_data=data)
"""
CONFIG = """
task: task.py:task
run_dir: run
steps: 2
batch_size: 16
learning_rate: 1e-2
devices: cpu:4
mesh: {data: -1}
checkpoint: null
log: {progress: "off"}
"""
FEW = ("--no-mutants", "--jobs", "1")
ROLES = ("mesh={dp: -1}", "roles={dp: data}")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    name_axes({})


def run(*arguments):
    """Returns the exit code of `spmdkit verify run.yaml ...`."""
    with pytest.raises(SystemExit) as left:
        cli.app(["verify", "run.yaml", *arguments], prog_name="spmdkit", standalone_mode=False)
    return left.value.code


def config(**changes):
    return load_config("run.yaml", [f"{key}={value}" for key, value in changes.items()])


def test_right_task_exits_0_with_json(folder, capfd):
    assert run("--json", *FEW, "--microbatches", "1,2", "task_args.width=4", *ROLES) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["passed"] and report["tolerance"] == pytest.approx(7.6e-6, rel=0.5) and report["mutants"] == []
    assert [(case["mesh"], case["microbatches"]) for case in report["cases"]] == [
        ({}, 2),
        ({"dp": 4}, 1),
        ({"dp": 4}, 2),
    ]
    case = report["cases"][1]
    keys = [
        "mesh",
        "microbatches",
        "reducer",
        "sync",
        "loss_error",
        "gradient_error",
        "parameter_error",
        "worst_leaf",
        "passed",
    ]
    assert set(keys) <= case.keys() and case["worst_leaf"] == "w" and case["reducer"] == "sum"
    assert report["skipped"] == [] and case["restore_error"] == 0 and 0 <= case["eval_error"] < 1e-6


def test_wrong_task_exits_1_with_narrow_table(folder, capfd):
    assert run(*FEW, "--html", "new/page.html", "task_args.wrong=true", *ROLES) == 1
    page = (folder / "new" / "page.html").read_text()
    parts = ('class="mark bad">differs', "reduced twice", "dp 4", "verify of task.py", ">0 of 1</b>")
    assert all(part in page for part in parts)
    table = capfd.readouterr().out
    assert (
        "reduced twice" in table
        and "the size of dp" in table
        and "data" not in table
        and "DIFFERS" in table
        and "failed: 0 of 1 case equal" in table
    )
    assert re.search(r"first .*task.py:\d+", table.replace("\n", "")), table
    assert max(map(len, table.splitlines())) <= 100


MISTAKES = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

random = np.random.default_rng(0)
DATA = {"x": random.normal(size=(41, 8)).astype(np.float32), "y": random.normal(size=(41, 4)).astype(np.float32)}

@sk.task
def task():
    def loss_fn(params, batch, key):
        h = jnp.tanh(batch["x"] @ params["w"])
        loss = ((h - batch["y"]) ** 2).sum(-1)
        # here
        return sk.mean(loss)

    return sk.Task(lambda key: {"w": jax.random.normal(key, (8, 4)) / 3}, loss_fn, optax.adam, train_data=DATA)
"""


def run_with(folder, mistake, *arguments):
    """Returns the exit code of `spmdkit verify` where a line of the user's is `mistake`, and the number of the line."""
    text = MISTAKES.replace("# here", mistake)
    (folder / "task.py").write_text(text)
    return run(*FEW, *arguments), 1 + text.splitlines().index(f"        {mistake}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "drop_remainder", "says"),
    [
        (
            "loss = (loss * sk.example_mask()).sum() / jnp.maximum(sk.example_mask().sum(), 1)",
            "false",
            "is a per-shard value that differs along",
        ),
        (
            "loss = loss * jax.random.bernoulli(key, 0.8, loss.shape)",
            "true",
            "draws different random numbers than one device",
        ),
        ("loss = loss - sk.all_gather(loss)[: len(loss)].mean()", "true", "differs from the value on one device"),
    ],
    ids=["a mean over the shard", "a forgotten key", "a statistic of one replica"],
)
def test_mistake_in_user_code_is_located(folder, capfd, mistake, drop_remainder, says):
    code, line = run_with(folder, mistake, "--json", f"data.drop_remainder={drop_remainder}")
    (case,) = json.loads(capfd.readouterr().out)["cases"]
    assert code == 1 and not case["passed"]
    assert case["located"]["line"].endswith(f"task.py:{line} (loss_fn)") and says in case["located"]["text"]


@pytest.mark.slow
def test_locate_prints_line_of_mutants(folder, capfd):
    """And the table has a sentence for each."""
    assert run("--jobs", "1", "--locate", "task_args.width=4") == 0
    table = capfd.readouterr().out.replace("\n", "")
    assert re.search(r"reduction_dropped: spmdkit/verify/mutations.py:\d+ \(_first_only\): select_n", table), table


def test_workers_open_task_while_reference_runs(monkeypatch):
    begun = threading.Barrier(3, timeout=20)

    def respond(worker, job):
        begun.wait()  # all at once, or never
        return {"outcome": job["kind"]}

    monkeypatch.setattr(_Worker, "request", respond)
    with Pool({"devices": 1}, 3) as pool:
        assert pool.request({"kind": "reference"}) == {"outcome": "reference"}


def test_dead_worker_fails_its_case_and_resume(folder, capfd):
    options = VerifyOptions(mutants=False, jobs=1, microbatches="1,2", resume=folder / "done.jsonl")
    said = []
    report = verify_config(config(**{"task_args.dies": "true"}), options, said.append)
    assert [case["passed"] for case in report["cases"]] == [True, False, False]
    assert "SIGABRT" in report["cases"][1]["diagnosis"]["found"]
    assert report["pattern"] == "only with several replicas" or "data" in report["pattern"]
    again = []
    assert verify_config(config(**{"task_args.dies": "true"}), options, again.append)["cases"] == report["cases"]
    assert len(said) == 4 and len(again) == 1


def test_task_failing_on_one_device_is_error(folder):
    (folder / "task.py").write_text(TASK.replace('params["w"]', 'params["v"]'))
    with pytest.raises(sk.SpmdkitError, match="KeyError"):
        verify_config(config(), VerifyOptions(mutants=False, jobs=1))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"microbatches": "1,x"}, "--microbatches 1,2,4"),
        ({"devices": 0}, "--devices 8"),
        ({"devices": 3, "all_meshes": True, "max_axis": 2}, "--max-axis 3"),
        ({"steps": 0}, "at least 1"),
        ({"jobs": 0}, "at least 1"),
    ],
)
def test_impossible_options_are_rejected(folder, options, says):
    with pytest.raises(ConfigError, match=says):
        verify_config(config(), VerifyOptions(**options))


def test_config_mesh_must_fit_devices(folder):
    with pytest.raises(ConfigError, match="data: 4"):
        verify_config(config(**{"mesh.data": 8}), VerifyOptions())


# ---- meshes


def test_all_meshes_of_8_and_16_devices():
    meshes = cases.all_meshes(8, 4)
    assert len(meshes) == 77 == len({tuple(mesh.items()) for mesh in meshes})
    assert {"data": 4, "tensor": 2} in meshes and {"data": 8} not in meshes
    assert len(cases.all_meshes(16, 2)) == 35 and all(len(mesh) == 4 for mesh in cases.all_meshes(16, 2))
