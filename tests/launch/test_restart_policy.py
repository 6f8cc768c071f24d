"""Whether what has ended is started again: pure, and once with real processes."""

import signal

import pytest

from spmdkit.foundation.run_status import directory_of, step_of, write_directory
from spmdkit.launch.restart_policy import Restarts


@pytest.mark.parametrize("code", [0, 1, 2, 77, 78, 79, 130])
def test_final_codes_are_not_restarted(code):
    assert Restarts(5).next_delay_s(code, 10) is None
    assert Restarts(0).next_delay_s(137, 10) is None


def test_three_attempts_without_a_newer_step_end():
    restarts = Restarts(9)
    assert [restarts.next_delay_s(137, 10), restarts.next_delay_s(137, 20)] == [1.0, 1.0]
    assert [restarts.next_delay_s(70, 20), restarts.next_delay_s(75, 20)] == [2.0, 4.0]
    assert restarts.next_delay_s(70, 20) is None
    assert restarts.why == "3 attempts in a row have committed no step"


def test_checkpoint_from_before_the_launcher_is_no_progress():
    restarts = Restarts(9)
    assert [restarts.next_delay_s(137, 10, before=10), restarts.next_delay_s(137, 10, before=10)] == [1.0, 2.0]
    assert restarts.next_delay_s(137, 10, before=10) is None
    restarts = Restarts(9)
    assert [restarts.next_delay_s(137, 10, before=10), restarts.next_delay_s(137, 15, before=10)] == [1.0, 1.0]


def test_preemption_costs_no_restart():
    restarts = Restarts(1)
    assert all(restarts.next_delay_s(42, None) is not None for _ in range(10))
    assert restarts.next_delay_s(137, 5) is not None and restarts.num_remaining == 0
    assert restarts.next_delay_s(137, 6) is None and "--max-restarts" in restarts.why


def test_wait_doubles_up_to_a_minute():
    restarts = Restarts(1)
    assert [restarts.next_delay_s(42, None) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_run_directory_is_written_behind_the_step(tmp_path):
    path = tmp_path / "note"
    path.write_bytes(b"%20d\n" % 7)
    assert directory_of(path.read_bytes()) is None
    write_directory(path, tmp_path / "run of mine")
    assert step_of(path.read_bytes()) == 7
    assert directory_of(path.read_bytes()) == tmp_path / "run of mine"


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from spmdkit.foundation.run_status import StepMark, write_directory
me, run = int(os.environ['SPMDKIT_PROCESS_ID']), Path('run').absolute()
run.joinpath('checkpoints').mkdir(parents=True, exist_ok=True)
StepMark([Path(os.environ['SPMDKIT_STEP_FILE'])]).at(3)
write_directory(Path(os.environ['SPMDKIT_STEP_FILE']), run)
print('hello', me, os.environ['SPMDKIT_COORDINATOR'])
print('password=abcdefghi', file=sys.stderr)
time.sleep(0.3)
number = len(list(run.joinpath('logs').glob('attempt_*')))
"""


@pytest.mark.processes
def test_killed_processes_are_restarted_with_new_ports(run, tmp_path):
    (tmp_path / "run.yaml").write_text("task_args: {logins: [{user: me, password: of the file}]}")
    script = SCRIPT + (
        "print(sys.argv[1:], 'of the file')\n"
        "if number < 2 and me == 1: run.joinpath('checkpoints', '1').mkdir(); os.kill(os.getpid(), 9)\n"
    )
    result = run(script, 2, max_restarts=5, arguments=["run.yaml", "task_args.db_pwd=canary"])
    assert result.code == 0, result.err
    assert "process 1 failed first: ended by SIGKILL (exit code 137)" in result.err
    found = "starting all processes again in 1 s: the newest checkpoint is of step 1; 4 of 5 restarts are left"
    assert found in result.err
    logs = tmp_path / "run" / "logs"
    assert sorted(p.name for p in logs.iterdir()) == ["attempt_1", "attempt_2"]
    printed = [(logs / f"attempt_{k}" / "p001" / "stdout.txt").read_text() for k in (1, 2)]
    assert all(text.startswith("hello 1 127.0.0.1:") for text in printed) and len(set(printed)) == 2, "a port is reused"
    assert (logs / "attempt_2" / "p000" / "stderr.txt").read_text() == "password=***\n"
    assert printed[1].splitlines()[-1] == "['run.yaml', 'task_args.db_pwd=***'] ***"


@pytest.mark.processes
def test_attempts_that_commit_nothing_end(run, tmp_path):
    (tmp_path / "run" / "checkpoints" / "10").mkdir(parents=True)
    result = run(SCRIPT + "os.kill(os.getpid(), 9)\n", 1, max_restarts=9)
    assert result.code == 137
    assert result.err.splitlines()[-1] == "not started again: 3 attempts in a row have committed no step"
    assert sorted(p.name for p in (tmp_path / "run" / "logs").iterdir()) == ["attempt_1", "attempt_2", "attempt_3"]


@pytest.mark.processes
def test_stopped_launcher_restarts_nothing(start):
    launched = start("import os; os._exit(75)", 1, max_restarts=5)
    for line in launched.popen.stderr:
        if "starting all processes again" in line:
            break
    launched.popen.send_signal(signal.SIGTERM)
    result = launched.wait(timeout_s=20)
    assert result.code == 42
    assert result.err.splitlines()[-1] == "not started again: the launcher received a signal to stop"
