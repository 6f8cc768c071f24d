"""A healthy job for an hour (SOAK_S): whatever takes long in it, nothing is taken for a fault."""

import faulthandler
import os
import signal
import time

import pytest

pytestmark = pytest.mark.processes

SOAK_S = float(os.environ.get("SOAK_S", "3600"))
SLOW_S, SAVE_S, GRACE_S = 20.0, 5.0, 120.0
"""What compiling and an evaluation take, and each of the two renames of a save; what launch leaves for the last save,
and the one before it."""


def events_of(job, kind):
    return [event for event in job.events() if event["event"] == kind]


@pytest.mark.slow
def test_healthy_hour_has_no_false_alarm(job):
    """With the limits of a config that says nothing of them. What is printed goes to a file: a pipe that nobody reads
    would hold up the job."""
    faulthandler.dump_traceback_later(SOAK_S + 300, exit=True)
    command = ["launch", "-n", "2", "--grace-s", str(GRACE_S), "--", "train", "run.yaml"]
    rhythm = [
        "log.every_steps=200",
        "eval.every_steps=2000",
        "checkpoint.every_steps=null",
        "checkpoint.every_seconds=40",
        "steps=100000000",
    ]
    with (job.folder / "output.txt").open("w+") as output:
        slow = {0: ["slow", 2], 1: ["slow", SLOW_S]}
        child = job.start(*command, *rhythm, output=output, SAVE_S=str(SAVE_S), faults=slow, EVALUATED="1")
        begin, at = time.monotonic(), []
        while time.monotonic() - begin < SOAK_S:
            time.sleep(min(30.0, SOAK_S / 4))
            at.append(job.steps()[-1] if job.steps() else 0)
            assert child.poll() is None, (job.folder / "output.txt").read_text()[-4000:]
        child.send_signal(signal.SIGTERM)
        code = child.wait(timeout=GRACE_S + 30)
        said = (job.folder / "output.txt").read_text()
    saves, evaluations = [e for e in events_of(job, "saved") if e["process"] == 0], said.count(" eval ")
    print(f"{SOAK_S:.0f} s, {at[-1]} steps, {len(saves)} saves, {evaluations} evaluations, exit code {code}")
    assert code == 42, said[-4000:]
    assert (job.folder / "slow-saves").is_file(), "no save was slow"
    assert len(saves) >= SOAK_S / 120 and evaluations >= SOAK_S / 300
    assert not events_of(job, "fault"), events_of(job, "fault")
    assert job.processes() == {} and not job.service_processes()
