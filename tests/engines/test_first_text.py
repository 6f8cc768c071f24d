"""The linear regression y = 2x of the text that the project began with: three processes, saved every five seconds,
killed and started again, goes on by itself.

The same final numbers from `spmdkit launch`, TF_CONFIG and mpirun here, and from Slurm, ssh, Kubernetes' environments
and Ray in the files beside this one.
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

pytestmark = [pytest.mark.processes]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """The losses of three processes of `spmdkit launch` that nothing disturbs."""
    return jobs.local(tmp_path_factory.mktemp("three") / "project", 3, *jobs.THREE)


def started(folder, environments, command, timeout=120):
    """Runs a command with each environment together; returns [(code, output)]."""
    options = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, env=env, **options) for env in environments]
    try:
        return [(p.returncode, output) for p in processes for output in [p.communicate(timeout=timeout)[0]]]
    finally:
        for process in processes:
            process.kill()
            process.wait()


TRAIN = [sys.executable, "-m", "spmdkit", "train", "run.yaml"]


def test_tf_config_of_a_chief_two_workers_and_an_evaluator_has_the_same_numbers(tmp_path, three):
    folder = jobs.project(tmp_path / "project")
    (folder / "task.py").write_text(jobs.TASK.replace("train_data=", "eval_data={'x': x, 'y': 2 * x}, train_data="))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cluster = {"chief": [f"127.0.0.1:{port}"], "worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    tasks = [("chief", 0), ("worker", 0), ("worker", 1), ("evaluator", 0)]
    told = [{"cluster": cluster, "task": {"type": kind, "index": index}} for kind, index in tasks]
    environments = [jobs.environment(TF_CONFIG=json.dumps(one)) for one in told]
    ended = started(folder, environments, [*TRAIN, *jobs.THREE])
    assert [code for code, _ in ended] == [0] * 4, ended
    assert jobs.losses(folder) == three
    assert "3 processes: tf_config (task chief 0 of 3), since it allocated this host" in ended[0][1]
    evaluated = [json.loads(line) for line in (folder / "run/evaluator.jsonl").read_text().splitlines()]
    assert evaluated[-1]["step"] == 40 and "evaluator of " in ended[3][1]
    (first,) = jobs.events(folder, "started")[:1]
    assert first["roles"]["commits"] == first["roles"]["summaries"] == 0 and first["roles"]["initialises"] == "all"


@pytest.mark.slow
def test_killed_and_started_again_it_goes_on_by_itself_to_the_same_numbers(tmp_path, three):
    folder = jobs.project(tmp_path / "project")
    (folder / "task.py").write_text(jobs.DIES_WHEN_SAVED)
    launch = [*TRAIN[:3], "launch", "-n", "3", "--max-restarts", "2", "--", *TRAIN[3:], *jobs.THREE]
    ((code, output),) = started(folder, [jobs.environment()], launch, 200)
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
    command = ["mpirun", *root, "--oversubscribe", "-np", "3", *TRAIN, *jobs.THREE]
    ((code, output),) = started(folder, [jobs.environment()], command)
    assert code == 0, output
    assert jobs.losses(folder) == three
    assert "3 processes: open_mpi (OMPI_COMM_WORLD_SIZE=3, OMPI_COMM_WORLD_RANK=0)" in output


@pytest.mark.slow
def test_variables_on_the_host_have_the_same_numbers_in_several_processes(tmp_path, three):
    """CentralStorageStrategy: parameters and optimizer live in the hosts' memory, the devices compute."""
    held = jobs.local(tmp_path / "project", 3, *jobs.THREE, "offload=[params, optimizer]")
    assert held == pytest.approx(three, rel=1e-6)
