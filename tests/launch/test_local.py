"""The launcher with real processes: lines, exit codes, who is blamed, and that nothing is left behind."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from spmdkit.errors import ConfigError
from spmdkit.launch.local import child_environment, launch

pytestmark = pytest.mark.processes

ME = "import os, sys, time, signal; me = int(os.environ['SPMDKIT_PROCESS_ID']); "


def test_every_line_carries_its_process_and_success_is_0(start):
    result = start(ME + "print('out', me); print('a\\nb'); print('err', me, file=sys.stderr)", 3).wait()
    assert result.code == 0, result.err
    assert sorted(result.out.splitlines()) == sorted(f"[{p}] {x}" for p in range(3) for x in (f"out {p}", "a", "b"))
    assert sorted(result.err.splitlines()) == [f"[{p}] err {p}" for p in range(3)]


def test_lines_come_while_the_process_runs(start):
    launched = start(ME + "print('here'); time.sleep(60)", 2)
    launched.read_until("here", count=2)
    launched.popen.send_signal(signal.SIGTERM)
    assert launched.wait(timeout_s=20).code == 143


def test_a_last_line_without_an_end_and_bytes_that_are_no_text_come_out(start):
    result = start(ME + "sys.stdout.buffer.write(b'x\\xff'); sys.stdout.flush()", 1).wait()
    assert result.out == "[0] x\ufffd\n"


def test_the_first_failure_ends_all_and_gives_its_code_and_its_words_last(start):
    script = (
        ME
        + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a process stuck in JAX
if me == 1:
    print("what went wrong", file=sys.stderr)
    os._exit(7)
print("waiting")
time.sleep(60)
"""
    )
    result = start(script, 3).wait()
    assert result.code == 7
    assert result.err.splitlines()[-2:] == ["process 1 failed first with exit code 7:", "what went wrong"]


def test_an_end_of_the_coordination_service_itself_is_said(start):
    script = ME + "print('here'); time.sleep(60 if me else 1); os.abort()"
    launched = start(script, 2)
    launched.read_until("here", count=2)
    children = Path(f"/proc/{launched.popen.pid}/task/{launched.popen.pid}/children").read_text().split()
    (service_process,) = [
        pid for pid in children if "cluster/service/service.py" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    os.kill(int(service_process), signal.SIGKILL)
    result = launched.wait(timeout_s=20)
    assert result.code == 134
    assert "the process of the coordination service has ended with -9, which ends all that use it" in result.err


def test_a_process_killed_by_a_signal_gives_128_plus_its_number(start):
    result = start(ME + "os.kill(os.getpid(), signal.SIGKILL) if me == 0 else time.sleep(60)", 2).wait()
    assert result.code == 137
    assert result.err.splitlines()[-1] == "process 0 failed first: ended by SIGKILL (exit code 137)"


def test_the_error_file_wins_over_an_earlier_abort(start):
    script = (
        ME
        + """
import json
if me == 0:
    os.abort()
time.sleep(0.2)
record = {"process": me, "exit_code": 70, "message": "the cause", "time": time.time()}
open(os.environ["SPMDKIT_ERROR_FILE"], "w").write(json.dumps(record))
os._exit(70)
"""
    )
    result = start(script, 2).wait()
    assert result.code == 70
    assert result.err.splitlines()[-1] == "the cause"


def test_when_one_stops_on_request_the_others_may_finish_saving(start):
    script = ME + "time.sleep(2.5 if me == 0 else 0); print('saved', me); os._exit(42)"
    result = start(script, 2).wait()
    assert result.code == 42
    assert "[0] saved 0" in result.out


def test_ctrl_c_reaches_the_processes_and_their_code_is_returned(start):
    script = (
        ME
        + """
def stop(*_):
    print("saving", me)
    sys.exit(42)
signal.signal(signal.SIGINT, stop)
print("ready")
time.sleep(60)
"""
    )
    launched = start(script, 2)
    launched.read_until("ready", count=2)
    launched.popen.send_signal(signal.SIGINT)
    result = launched.wait(timeout_s=20)
    assert result.code == 42
    assert sorted(result.out.splitlines()) == ["[0] saving 0", "[1] saving 1"]


def test_the_second_ctrl_c_kills(start):
    launched = start(
        ME + "signal.signal(signal.SIGINT, lambda *_: print('no')); print('ready')\nwhile True: time.sleep(1)", 2
    )
    launched.read_until("ready", count=2)
    launched.popen.send_signal(signal.SIGINT)
    launched.read_until("no", count=2)
    launched.popen.send_signal(signal.SIGINT)
    assert launched.wait(timeout_s=20).code == 130


def test_after_the_grace_the_deaf_are_killed(start):
    launched = start(ME + "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(60)", 2)
    launched.read_until("ready", count=2)
    launched.popen.send_signal(signal.SIGTERM)
    result = launched.wait(timeout_s=20)  # the fixture's grace is 4 s
    assert result.code == 143
    assert result.wall_s >= 4


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pids, timeout_s=5):
    deadline = time.monotonic() + timeout_s
    while any(alive(p) for p in pids):
        assert time.monotonic() < deadline, f"still alive: {[p for p in pids if alive(p)]}"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_kill_9_of_the_launcher_leaves_no_process(start):
    script = ME + "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('pid', os.getpid()); time.sleep(60)"
    launched = start(script, 3)
    pids = [int(line.split()[-1]) for line in launched.read_until("pid", count=3)]
    children = Path(f"/proc/{launched.popen.pid}/task/{launched.popen.pid}/children").read_text()
    service_processes = {int(pid) for pid in children.split()} - set(pids)
    assert all(alive(p) for p in pids) and len(service_processes) == 1, (
        "three processes, and one for the coordination service"
    )
    os.kill(launched.popen.pid, signal.SIGKILL)
    wait_until_dead([*pids, *service_processes])


def test_a_failure_also_ends_what_the_processes_started(start):
    script = (
        ME
        + """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("pid", child.pid)
time.sleep(0.5)
os._exit(3 if me == 1 else 0)
"""
    )
    launched = start(script, 2)
    pids = [int(line.split()[-1]) for line in launched.read_until("pid", count=2)]
    assert launched.wait(timeout_s=20).code == 3
    wait_until_dead(pids)


@pytest.mark.parametrize(("count", "devices"), [(0, None), (-1, None), (2, 0)])
def test_counts_below_one_are_refused(count, devices):
    with pytest.raises(ConfigError, match="at least one"):
        launch([sys.executable, "-c", ""], count, devices)


@pytest.mark.parametrize("options", [{"max_restarts": -1}, {"grace_s": -1.0}, {"grace_s": float("nan")}])
def test_restarts_and_seconds_that_cannot_be_are_refused(options):
    name = "--" + next(iter(options)).replace("_", "-")
    with pytest.raises(ConfigError, match=name):
        launch([sys.executable, "-c", ""], 1, **options)


def test_the_processes_are_told_their_place_and_keep_the_rest(tmp_path):
    env = child_environment({"HOME": "/h", "http_proxy": "p", "no_proxy": "x"}, "127.0.0.1:9", 4, 2, 3, tmp_path / "e")
    assert env["HOME"] == "/h"
    assert env["PYTHONUNBUFFERED"] == "1"
    assert {k: v for k, v in env.items() if k.startswith("SPMDKIT_")} == {
        "SPMDKIT_COORDINATOR": "127.0.0.1:9",
        "SPMDKIT_NUM_PROCESSES": "4",
        "SPMDKIT_PROCESS_ID": "2",
        "SPMDKIT_DEVICES_PER_PROCESS": "3",
        "SPMDKIT_ERROR_FILE": str(tmp_path / "e"),
    }
    assert env["no_proxy"] == "127.0.0.1,localhost,x"
