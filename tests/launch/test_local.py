"""The launcher with real processes: lines, exit codes, who is blamed, and that nothing is left behind."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from spmdkit.errors import ConfigError
from spmdkit.launch.local import child_environment, launch

pytestmark = pytest.mark.processes

ME = "import os, sys, time, signal, json; me = int(os.environ['SPMDKIT_PROCESS_ID']); "


def test_every_line_carries_its_process(run):
    last = "sys.stdout.buffer.write(b'x\\xff'); sys.stdout.flush()"
    result = run(ME + f"print('out', me); print('a\\nb'); print('err', me, file=sys.stderr); {last}", 3)
    assert result.code == 0, result.err
    lines = lambda p: (f"out {p}", "a", "b", "x\ufffd")
    assert sorted(result.out.splitlines()) == sorted(f"[{p}] {x}" for p in range(3) for x in lines(p))
    assert sorted(result.err.splitlines()) == [f"[{p}] err {p}" for p in range(3)]


FAILS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a process stuck in JAX
if me == 1:
    print("what went wrong", file=sys.stderr)
    os._exit(7)
time.sleep(20)
print("outlived")
"""
REPORTS = """
if me == 0:
    os.abort()
time.sleep(1.2)  # as on a busy machine
record = {"process": me, "exit_code": 70, "message": "the cause", "time": time.time()}
open(os.environ["SPMDKIT_ERROR_FILE"], "w").write(json.dumps(record))
os._exit(70)
"""


@pytest.mark.parametrize(
    ("script", "code", "last"),
    [
        (FAILS, 7, ["process 1 failed first with exit code 7:", "what went wrong"]),
        (
            "os.kill(os.getpid(), signal.SIGKILL) if me == 0 else time.sleep(60)",
            137,
            ["process 0 failed first: ended by SIGKILL (exit code 137)"],
        ),
        (REPORTS, 70, ["the cause"]),
    ],
    ids=["first failure", "signal", "error file over an earlier abort"],
)
def test_first_failure_ends_all_with_its_message(run, script, code, last):
    result = run(ME + script)
    assert result.code == code
    assert result.err.splitlines()[-len(last) :] == last
    assert "outlived" not in result.out


def test_others_may_save_after_a_requested_stop(run):
    result = run(ME + "time.sleep(1.5 if me == 0 else 0); print('saved', me); os._exit(42)")
    assert result.code == 42
    assert "[0] saved 0" in result.out


READY = """
def stop(*_):
    print("stopping", me)
    sys.exit(42) if number == signal.SIGINT and me < 2 else None
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
print("ready", os.getpid())
while True:
    time.sleep(1)
"""


def test_ctrl_c_reaches_all_and_returns_their_code(start):
    launched = start(ME + READY)
    launched.read_until("ready", count=2)
    launched.popen.send_signal(signal.SIGINT)
    result = launched.wait(timeout_s=20)
    assert result.code == 42
    assert sorted(result.out.splitlines()) == ["[0] stopping 0", "[1] stopping 1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_deaf_processes_are_killed(start, number):
    """By the second Ctrl-C, or after the grace of 4 s."""
    launched = start(ME + READY.replace("me < 2", "False"))
    launched.read_until("ready", count=2)
    launched.popen.send_signal(number)
    if number == signal.SIGINT:
        launched.read_until("stopping", count=2)
        launched.popen.send_signal(number)
    result = launched.wait(timeout_s=20)
    assert result.code == 128 + number
    assert (result.wall_s >= 4) or number == signal.SIGINT


COUNTS = """
import faulthandler
faulthandler.register(signal.SIGQUIT) if me == 0 else None
print("ready", os.getpid(), flush=True)
while not os.path.exists("done"):
    time.sleep(0.02)
"""


def test_sigquit_prints_stacks_and_ends_nothing(start, tmp_path):
    launched = start(ME + COUNTS)
    launched.read_until("ready", count=2)
    launched.popen.send_signal(signal.SIGQUIT)
    limit = threading.Timer(30, launched.popen.kill)  # a launcher that pauses prints nothing
    limit.daemon = True
    limit.start()
    line = ""
    while not line.startswith("[0]   File"):
        line = launched.popen.stderr.readline()
        assert line
        assert not line.startswith("process 1") or "process 1 prints no stacks: it has no handler of SIGQUIT" in line
    limit.cancel()
    (tmp_path / "done").touch()
    result = launched.wait(timeout_s=20)
    assert result.code == 0, result.err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_z_pauses_all_until_sigcont(start, tmp_path):
    launched = start(ME + COUNTS)
    pids = [int(line.split()[-1]) for line in launched.read_until("ready", count=2)]
    states = lambda: {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}
    pids.append(launched.popen.pid)
    for number, expected in ((signal.SIGTSTP, {"T"}), (signal.SIGCONT, {"S", "R", "D"})) * 2:
        launched.popen.send_signal(number)
        deadline = time.monotonic() + 10
        while not states() <= expected:
            assert time.monotonic() < deadline, states()
            time.sleep(0.02)
    (tmp_path / "done").touch()
    assert launched.wait(timeout_s=20).code == 0


def test_escapes_of_a_failed_process_are_not_printed(run):
    result = run(ME + "print('\\x1b]0;title\\x07', file=sys.stderr); sys.exit(7 if me else 0)")
    explained = result.err[result.err.index("process 1 failed first") :]
    assert result.code == 7 and "\\x1b]0;title\\x07" in explained and "\x1b" not in explained


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pids, timeout_s=5):
    deadline = time.monotonic() + timeout_s
    while any(alive(p) for p in pids):
        assert time.monotonic() < deadline, f"still alive: {[p for p in pids if alive(p)]}"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_killed_launcher_leaves_no_process(start, tmp_path):
    launched = start(ME + READY)
    pids = [int(line.split()[-1]) for line in launched.read_until("ready", count=2)]
    children = Path(f"/proc/{launched.popen.pid}/task/{launched.popen.pid}/children").read_text()
    service_processes = {int(pid) for pid in children.split()} - set(pids)
    assert all(alive(p) for p in pids) and len(service_processes) == 1, "two processes and the coordination service"
    os.kill(launched.popen.pid, signal.SIGKILL)
    wait_until_dead([*pids, *service_processes])
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_end_of_the_coordination_service_is_reported(start):
    launched = start(ME + "print('here'); time.sleep(60 if me else 1); os.abort()")
    launched.read_until("here", count=2)
    children = Path(f"/proc/{launched.popen.pid}/task/{launched.popen.pid}/children").read_text().split()
    (service,) = [pid for pid in children if "cluster/service/service.py" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(int(service), signal.SIGKILL)
    result = launched.wait(timeout_s=20)
    assert result.code == 134
    assert "the process of the coordination service has ended with -9, which ends all that use it" in result.err


def test_failure_ends_what_the_processes_started(run):
    script = """
import subprocess
print("pid", subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]).pid)
time.sleep(0.5)
os._exit(3 if me == 1 else 0)
"""
    result = run(ME + script)
    assert result.code == 3
    wait_until_dead([int(line.split()[-1]) for line in result.out.splitlines()])


@pytest.mark.parametrize(
    ("count", "options", "part"),
    [
        (0, {}, "at least one"),
        (2, {"devices_per_process": 0}, "at least one"),
        (1, {"max_restarts": -1}, "--max-restarts"),
        (1, {"grace_s": float("nan")}, "--grace-s"),
    ],
)
def test_numbers_out_of_range_are_rejected(count, options, part):
    with pytest.raises(ConfigError, match=part):
        launch([sys.executable, "-c", ""], count, **options)


def test_environment_holds_the_place_of_a_process(tmp_path):
    env = child_environment({"HOME": "/h", "http_proxy": "p", "no_proxy": "x"}, "127.0.0.1:9", 4, 2, 3, tmp_path / "e")
    assert (env["HOME"], env["PYTHONUNBUFFERED"], env["no_proxy"]) == ("/h", "1", "127.0.0.1,localhost,x")
    assert {k: v for k, v in env.items() if k.startswith("SPMDKIT_")} == {
        "SPMDKIT_COORDINATOR": "127.0.0.1:9",
        "SPMDKIT_NUM_PROCESSES": "4",
        "SPMDKIT_PROCESS_ID": "2",
        "SPMDKIT_DEVICES_PER_PROCESS": "3",
        "SPMDKIT_ERROR_FILE": str(tmp_path / "e"),
    }
