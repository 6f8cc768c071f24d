"""Signals to real runs at every stage, and readers of their output that go away."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.jobs import REPOSITORY

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_hangup_saves_and_sigquit_shows_stacks(job, number):
    child = job.train()
    job.wait_for(lambda: len(job.steps()) > 1)
    child.send_signal(signal.SIGQUIT)
    before = len(job.steps())
    job.wait_for(lambda: len(job.steps()) > before)
    child.send_signal(number)
    time.sleep(0.2)
    while child.poll() is None:  # also once it has saved, and in its last moment
        child.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    ended = job.end_of(child)
    assert ended.code == 42, ended.output
    assert "most recent call first" in ended.output and "run_steps" in ended.output, "SIGQUIT shows stacks"
    last = job.events()[-1]
    assert (last["event"], last["signal"]) == ("preempted", number.name)
    assert job.saved()[-1] == last["step"], "the newest checkpoint is of the last step"


def test_sigterm_before_the_loop_exits_with_42(job):
    child = job.train(faults={0: ["import", 0]})
    job.wait_for(job.fired)
    child.send_signal(signal.SIGTERM)
    ended = job.end_of(child)
    assert ended.code == 42, ended.output
    assert "stopped by SIGTERM before the first step; nothing is lost" in ended.output
    assert "Traceback" not in ended.output


def handles_sigterm(pid):
    """Whether a process has a handler of SIGTERM: spmdkit's first statement (Linux)."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_early_ctrl_c_shows_no_traceback(job):
    for launch, wait_s in (([], 0.0), (["launch", "-n", "2", "--"], 0.2)):
        child = job.start(*launch, "train", "run.yaml", fresh=True)
        job.wait_for(lambda child=child: handles_sigterm(child.pid))
        time.sleep(wait_s)
        child.send_signal(signal.SIGINT)
        ended = job.end_of(child)
        assert ended.code == 130, (wait_s, ended.output)
        assert "Traceback" not in ended.output, (wait_s, ended.output)


def test_sigterm_with_a_hanging_source_saves(job):
    child = job.train(faults={0: ["data sleep", 12]})
    job.wait_for(job.fired)
    job.wait_for(lambda: len(job.steps()) > 1)
    time.sleep(0.5)
    (job.folder / "fired-0").write_text(f"{time.monotonic()}")
    child.send_signal(signal.SIGTERM)
    ended = job.end_of(child)
    assert ended.code == 42, ended.output
    last = job.events()[-1]
    assert last["event"] == "preempted" and job.saved()[-1] == last["step"] > 0


@pytest.mark.slow
def test_hanging_source_of_two_processes_exits_on_sigterm(job):
    child = job.train(n=2, faults={1: ["data sleep", 12]})
    job.wait_for(job.fired)
    time.sleep(1.0)
    child.send_signal(signal.SIGTERM)
    ended = job.end_of(child)
    assert ended.code == 143, ended.output
    assert "stopped by SIGTERM, and train_data has not returned the batch of step" in ended.output
    assert job.processes() == {}


@pytest.mark.parametrize(
    "redirection",
    ["| head -1", *(pytest.param(r, marks=pytest.mark.slow) for r in (">&- 2>&- <&-", ">&-", "> /dev/full"))],
)
def test_closed_output_ends_no_training(job, redirection):
    command = shlex.join([sys.executable, "-m", "spmdkit", "train", "run.yaml", "devices=cpu:2", "steps=12"])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {redirection}"],
        cwd=job.folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert job.saved()[-1] == 12
    assert json.loads((job.folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 12
