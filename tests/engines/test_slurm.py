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


def submitted(cluster, folder, *more, num=2, settings=(), restarts=0):
    """Returns the number of the job that `spmdkit launch --on slurm` puts in the queue from a project."""
    words = jobs.launch("slurm", num, f"python={sys.executable}", *settings, restarts=restarts, train=more)
    return int(re.search(r"Submitted batch job (\d+)", cluster.command(*words, cwd=folder))[1])


def test_two_nodes_have_numbers_of_a_local_run(cluster, tmp_path, expected):
    folder = jobs.project(tmp_path / "project")
    job = submitted(cluster, folder)
    ended = cluster.wait(job, 120)
    output = (folder / f"run-{job}.out").read_text()
    assert ended == "COMPLETED 0:0 0", output
    assert jobs.losses(folder) == expected
    assert "note: 2 processes: slurm (SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=0), since it started this process" in output
    assert {event["process"] for event in jobs.events(folder, "compiled")} == {0, 1}


def test_three_tasks_on_one_node_equal_local_processes(cluster, tmp_path):
    expected = jobs.local(tmp_path / "local", 3, *jobs.THREE)
    folder = jobs.project(tmp_path / "project")
    job = submitted(cluster, folder, *jobs.THREE, num=3, settings=("tasks_per_node=3",))
    assert cluster.wait(job, 120) == "COMPLETED 0:0 0", (folder / f"run-{job}.out").read_text()
    assert jobs.losses(folder) == expected


def test_usr1_saves_and_requeues_to_the_same_numbers(cluster, tmp_path, expected):
    folder = jobs.project(tmp_path / "project", jobs.SLOWLY)
    job = submitted(cluster, folder, "checkpoint.every_steps=100")
    jobs.wait_for_steps(folder, lambda: cluster.state(job).split()[0] in ("PENDING", "RUNNING"))
    cluster.command("scancel", "--signal=USR1", str(job))  # what --signal=USR1@120 sends, to all tasks
    assert cluster.wait(job, 150) == "COMPLETED 0:0 1", (folder / f"run-{job}.out").read_text()
    assert jobs.losses(folder) == expected
    assert next(event["signal"] for event in jobs.events(folder, "preempted")) == "SIGUSR1"
    assert "stopped and saved: in the queue again" in (folder / f"run-{job}.out").read_text()


def test_final_code_is_not_put_in_the_queue(cluster, tmp_path):
    folder = jobs.project(tmp_path / "project")
    job = submitted(cluster, folder, "batch_size=15", restarts=3)
    assert cluster.wait(job, 100) == "FAILED 78:0 0", (folder / f"run-{job}.out").read_text()


def test_dead_task_ends_the_step_and_job_restarts(cluster, tmp_path, expected):
    folder = jobs.project(tmp_path / "project", jobs.DIES)
    job = submitted(cluster, folder, restarts=1)
    assert cluster.wait(job, 150) == "COMPLETED 0:0 1", (folder / f"run-{job}.out").read_text()
    assert jobs.losses(folder) == expected
    assert json.loads((folder / "run/events.jsonl").read_text().splitlines()[0])["event"] == "started"
