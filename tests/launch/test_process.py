"""What spmdkit starts dies with it, and not with the thread that asked for it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spmdkit.launch import process
from spmdkit.launch.process import exit_status, start
from tests.launch.test_local import alive, wait_until_dead

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")]

REPOSITORY = Path(__file__).resolve().parents[2]


def test_child_outlives_the_thread_that_started_it():
    started, pipes = [], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}

    def work():
        started.append(start(["cat"], **pipes))
        started[0].stdin.write("first\n")
        started[0].stdout.readline()  # it has called the kernel and become `cat`

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    time.sleep(0.3)
    process = started[0]
    assert exit_status(process.pid) is None
    assert process.communicate("still here\n", timeout=20)[0] == "still here\n"
    assert process.returncode == 0


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_child_dies_with_its_killed_parent(in_a_thread):
    body = "print(start(['sleep', '60']).pid, flush=True)"
    call = f"t = threading.Thread(target=lambda: {body}); t.start(); t.join()" if in_a_thread else body
    code = f"import threading, time\nfrom spmdkit.launch.process import start\n{call}\ntime.sleep(60)"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        assert alive(pid)
        parent.send_signal(signal.SIGKILL)
    wait_until_dead([pid])


def test_missing_command_is_reported():
    process = start(["/nowhere/at-all"], stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert errors == "/nowhere/at-all: No such file or directory\n"


@pytest.mark.parametrize("pid", [-1, 0, 1])
def test_signals_to_all_processes_are_rejected(pid, monkeypatch):
    """`killpg(1)` is `kill(-1)`: everybody's."""
    sent = []
    monkeypatch.setattr(process.os, "killpg", lambda *asked: sent.append(asked))
    monkeypatch.setattr(process.os, "kill", lambda *asked: sent.append(asked))
    with pytest.raises(ValueError, match="none that we have started"):
        process.send(pid, signal.SIGKILL)
    assert not sent


def test_busy_time_counts_work_only():
    works, sleeps = (
        start([sys.executable, "-I", "-S", "-c", code]) for code in ("while True: pass", "import time; time.sleep(60)")
    )
    try:
        time.sleep(0.5)
        before, deadline = process.busy_ns(works.pid), time.monotonic() + 20
        while process.busy_ns(works.pid) < before + 1e8 and time.monotonic() < deadline:
            time.sleep(0.05)
        asleep = process.busy_ns(sleeps.pid)
        time.sleep(0.2)
        assert process.busy_ns(works.pid) >= before + 1e8 and process.busy_ns(sleeps.pid) < asleep + 1e7
    finally:
        for each in (works, sleeps):
            each.kill()
            each.wait()
    assert process.busy_ns(works.pid) is None
