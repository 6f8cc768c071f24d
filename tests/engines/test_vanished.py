"""The machine of process 0, which holds the coordination service, vanishes: the others say so, and none is ended by
JAX."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.engines import jobs
from tests.support import two_hosts

reason = two_hosts.missing()
pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.skipif(bool(reason), reason=reason)]
SETTINGS = ["steps=4000", "batch_size=15", "devices=cpu:3", "mesh.data=3", "checkpoint.every_steps=1000"]


@pytest.mark.parametrize("dies", [True, False], ids=["with its processes", "cut off"])
def test_the_others_end_with_75_within_the_limit_and_name_the_machine(tmp_path, dies):
    """Without a packet more from there: nobody closes a connection."""
    (tmp_path / "task.py").write_text(jobs.SLOWLY)
    (tmp_path / "run.yaml").write_text(jobs.CONFIG)
    metrics = tmp_path / "run/metrics.jsonl"
    with two_hosts.hosts(("host0", "host1", "host2")) as machines:
        own = {"SPMDKIT_COORDINATOR": "host0:7777", "SPMDKIT_NUM_PROCESSES": "3"}
        command = [sys.executable, "-m", "spmdkit", "train", "run.yaml", *SETTINGS]
        started = [
            machines.start(f"host{i}", command, cwd=tmp_path, env=jobs.on_path(**own, SPMDKIT_PROCESS_ID=str(i)))
            for i in range(3)
        ]
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") > 5):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        machines.cut("host0")
        if dies:
            pids = subprocess.run(["ip", "netns", "pids", machines.space("host0")], capture_output=True, text=True)
            for pid in pids.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
        said = [p.communicate(timeout=60)[0] for p in started[1:]]
    assert [p.returncode for p in started[1:]] == [75, 75], said
    for text in said:
        assert "the coordination service has not answered" in text and "silent" not in text
