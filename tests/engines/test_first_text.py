"""The linear regression y = 2x of the text that the project began with, from `spmdkit launch`, TF_CONFIG and mpirun:
the same numbers, also when a process is killed and the job restarts.

Slurm, ssh, Kubernetes' environments and Ray are in the other files of this folder.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from tests.engines import jobs
from tests.support.forks import Forks, Process

pytestmark = [pytest.mark.processes]
TRAIN = ["train", "run.yaml"]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """The losses of three processes of `spmdkit launch` without a fault."""
    return jobs.local(tmp_path_factory.mktemp("three") / "project", 3, *jobs.THREE)


def ended(folder, *command, timeout=200):
    """Returns (code, output) of a command."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": timeout}
    done = subprocess.run(command, cwd=folder, env=jobs.environment(), **options)
    return done.returncode, done.stdout


def test_tf_config_has_the_numbers_of_one_process(tmp_path):
    """A chief, a worker and an evaluator; two devices of one process have the same numbers."""
    folder = jobs.project(
        tmp_path / "project", jobs.TASK.replace("train_data=", "eval_data={'x': x, 'y': 2 * x}, train_data=")
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cluster = {"chief": [f"127.0.0.1:{port}"], "worker": ["127.0.0.1:1"]}
    roles = [{"type": kind, "index": 0} for kind in ("chief", "worker", "evaluator")]
    configs = [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": role})} for role in roles]
    with Forks() as forks:
        processes = forks.run([Process(TRAIN, folder, config) for config in configs], 120)
    assert [process.code for process in processes] == [0] * 3, processes
    assert jobs.losses(folder) == jobs.alone(tmp_path / "alone")
    assert "2 processes: tf_config (task chief 0 of 2), since it allocated this host" in processes[0].output
    evaluated = [json.loads(line) for line in (folder / "run/evaluator.jsonl").read_text().splitlines()]
    assert evaluated[-1]["step"] == 40 and "evaluator of " in processes[2].output
    (first,) = jobs.events(folder, "started")[:1]
    assert first["roles"]["commits"] == first["roles"]["summaries"] == 0 and first["roles"]["initialises"] == "all"


@pytest.mark.slow
def test_killed_job_restarts_to_the_same_numbers(tmp_path, three):
    folder = jobs.project(tmp_path / "project", jobs.DIES)
    launch = [sys.executable, "-m", "spmdkit", "launch", "-n", "3", "--max-restarts", "2", "--"]
    code, output = ended(folder, *launch, *TRAIN, *jobs.THREE)
    assert code == 0, output
    assert (folder / "died").exists() and "continuing at step" in output
    assert jobs.losses(folder) == three
    restored = jobs.events(folder, "restored")[0]
    assert 0 < restored["step"] < 40 and restored["roles"]["restores"] == "all"


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun (package openmpi-bin)")
def test_mpirun_has_the_same_numbers(tmp_path, three):
    folder = jobs.project(tmp_path / "project")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = ["mpirun", *root, "--oversubscribe", "-np", "3", sys.executable, "-m", "spmdkit"]
    code, output = ended(folder, *mpirun, *TRAIN, *jobs.THREE)
    assert code == 0, output
    assert jobs.losses(folder) == three
    assert "3 processes: open_mpi (OMPI_COMM_WORLD_SIZE=3, OMPI_COMM_WORLD_RANK=0)" in output


@pytest.mark.slow
def test_state_in_host_memory_has_the_same_numbers(tmp_path, three):
    """CentralStorageStrategy: parameters and optimizer are in the hosts' memory, the devices compute."""
    held = jobs.local(tmp_path / "project", 3, *jobs.THREE, "offload=[params, optimizer]")
    assert held == pytest.approx(three, rel=1e-6)
