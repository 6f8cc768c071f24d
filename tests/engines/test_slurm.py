"""The rendered batch script in a real Slurm of two nodes: the numbers of a local run, stopped and put in the queue
again, final codes not."""

import json
import re
import sys

import pytest

from tests.engines import jobs
from tests.support import local_slurm, two_hosts
from tests.support.local_slurm import slurm

reason = two_hosts.missing() or local_slurm.missing()
pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.skipif(bool(reason), reason=reason)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        made.environ |= jobs.on_path()
        yield made


def submitted(cluster, folder, *more, restarts=0):
    """Returns the number of the job that `spmdkit launch --on slurm` puts in the queue from a project."""
    own = ("--max-restarts", str(restarts), "--name", "run", "--set", f"python={sys.executable}")
    words = (
        sys.executable,
        "-m",
        "spmdkit",
        "launch",
        "--on",
        "slurm",
        "-n",
        "2",
        *own,
        "--",
        "train",
        "run.yaml",
        *more,
    )
    output = cluster.command(*words, cwd=folder)
    return int(re.search(r"Submitted batch job (\d+)", output)[1])


def test_a_job_on_two_nodes_has_the_numbers_of_a_local_run(cluster, tmp_path, expected):
    folder = jobs.project(tmp_path / "project")
    job = submitted(cluster, folder)
    ended = cluster.wait(job, 120)
    output = (folder / f"run-{job}.out").read_text()
    assert ended == "COMPLETED 0:0 0", output
    assert jobs.losses(folder) == expected
    assert "note: 2 processes: slurm (SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=0), since it started this process" in output
    assert {event["process"] for event in jobs.events(folder, "compiled")} == {0, 1}


def test_three_tasks_on_one_node_have_the_numbers_of_three_local_processes(cluster, tmp_path):
    expected = jobs.local(tmp_path / "local", 3, *jobs.THREE)
    folder = jobs.project(tmp_path / "project")
    own = ("--name", "run", "--set", f"python={sys.executable}", "--set", "tasks_per_node=3")
    words = (sys.executable, "-m", "spmdkit", "launch", "--on", "slurm", "-n", "3", *own, "--", "train", "run.yaml")
    output = cluster.command(*words, *jobs.THREE, cwd=folder)
    job = int(re.search(r"Submitted batch job (\d+)", output)[1])
    assert cluster.wait(job, 120) == "COMPLETED 0:0 0", (folder / f"run-{job}.out").read_text()
    assert jobs.losses(folder) == expected


def test_usr1_saves_and_the_job_is_in_the_queue_again_and_goes_on_to_the_same_numbers(cluster, tmp_path, expected):
    folder = jobs.project(tmp_path / "project")
    (folder / "task.py").write_text(jobs.SLOWLY)
    job = submitted(cluster, folder, "checkpoint.every_steps=100")
    while not (folder / "run/metrics.jsonl").is_file() or len(jobs.losses(folder)) < 2:
        assert cluster.state(job).split()[0] in ("PENDING", "RUNNING")
    cluster.command("scancel", "--signal=USR1", str(job))  # what --signal=USR1@120 sends, to all tasks
    deadline = 150
    assert cluster.wait(job, deadline) == "COMPLETED 0:0 1", (folder / f"run-{job}.out").read_text()
    assert jobs.losses(folder) == expected
    assert next(event["signal"] for event in jobs.events(folder, "preempted")) == "SIGUSR1"
    assert "stopped and saved: in the queue again" in (folder / f"run-{job}.out").read_text()


def test_a_code_that_another_start_would_end_with_again_is_not_put_in_the_queue(cluster, tmp_path):
    folder = jobs.project(tmp_path / "project")
    job = submitted(cluster, folder, "batch_size=15", restarts=3)
    assert cluster.wait(job, 100) == "FAILED 78:0 0", (folder / f"run-{job}.out").read_text()


def test_a_dead_task_brings_the_step_down_and_the_job_starts_again_as_often_as_it_may(cluster, tmp_path, expected):
    folder = jobs.project(tmp_path / "project")
    (folder / "task.py").write_text(jobs.DIES)
    job = submitted(cluster, folder, restarts=1)
    assert cluster.wait(job, 150) == "COMPLETED 0:0 1", (folder / f"run-{job}.out").read_text()
    assert jobs.losses(folder) == expected
    assert json.loads((folder / "run/events.jsonl").read_text().splitlines()[0])["event"] == "started"
