"""Whether what has ended is started again: pure, and once with real processes."""

import signal
import time

import pytest

from spmdkit.foundation.run_status import directory_of, step_of, write_directory
from spmdkit.launch.restart_policy import Restarts


@pytest.mark.parametrize("code", [0, 1, 2, 77, 78, 79, 130])
def test_what_another_start_would_end_with_again_is_final(code):
    assert Restarts(5).after(code, 10) is None


def test_without_restarts_nothing_is_started_again():
    assert Restarts(0).after(42, 10) is None
    assert Restarts(0).after(137, 10) is None


def test_three_attempts_in_a_row_without_a_newer_step_are_the_last():
    restarts = Restarts(9)
    assert [restarts.after(137, 10), restarts.after(137, 20)] == [1.0, 1.0]
    assert [restarts.after(70, 20), restarts.after(75, 20)] == [2.0, 4.0]
    assert restarts.after(70, 20) is None
    assert restarts.why == "3 attempts in a row have committed no step"


def test_a_checkpoint_from_before_the_launcher_is_no_progress_and_a_newer_one_is():
    restarts = Restarts(9)
    assert [restarts.after(137, 10, before=10), restarts.after(137, 10, before=10)] == [1.0, 2.0]
    assert restarts.after(137, 10, before=10) is None
    restarts = Restarts(9)
    assert [restarts.after(137, 10, before=10), restarts.after(137, 15, before=10)] == [1.0, 1.0]


def test_a_preemption_is_no_failure_and_costs_nothing():
    restarts = Restarts(1)
    assert all(restarts.after(42, None) is not None for _ in range(10))
    assert restarts.after(137, 5) is not None and restarts.left == 0
    assert restarts.after(137, 6) is None and "--max-restarts" in restarts.why


def test_the_wait_doubles_and_ends_at_a_minute():
    restarts = Restarts(1)
    assert [restarts.after(42, None) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_run_says_where_it_is_behind_its_step(tmp_path):
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
def test_killed_processes_are_started_again_with_other_ports_until_the_work_is_done_and_all_output_is_kept(
    start, tmp_path
):
    script = (
        SCRIPT
        + "if number < 3 and me == 1: run.joinpath('checkpoints', str(number)).mkdir(); os.kill(os.getpid(), 9)\n"
    )
    result = start(script, 2, max_restarts=5).wait()
    assert result.code == 0, result.err
    assert "process 1 failed first: ended by SIGKILL (exit code 137)" in result.err
    assert (
        "starting all processes again in 1 s: the newest checkpoint is of step 2; 3 of 5 restarts are left"
        in result.err
    )
    logs = tmp_path / "run" / "logs"
    assert sorted(p.name for p in logs.iterdir()) == ["attempt_1", "attempt_2", "attempt_3"]
    said = [(logs / f"attempt_{k}" / "p001" / "stdout.txt").read_text() for k in (1, 2, 3)]
    assert all(text.startswith("hello 1 127.0.0.1:") for text in said) and len(set(said)) == 3, "a port was used again"
    assert (logs / "attempt_3" / "p000" / "stderr.txt").read_text() == "password=***\n"


@pytest.mark.processes
def test_three_attempts_that_commit_nothing_beyond_the_checkpoint_that_was_there_are_the_last(start, tmp_path):
    (tmp_path / "run" / "checkpoints" / "10").mkdir(parents=True)
    result = start(SCRIPT + "os.kill(os.getpid(), 9) if me == 1 else time.sleep(60)\n", 2, max_restarts=9).wait()
    assert result.code == 137
    assert result.err.splitlines()[-1] == "not started again: 3 attempts in a row have committed no step"
    assert sorted(p.name for p in (tmp_path / "run" / "logs").iterdir()) == ["attempt_1", "attempt_2", "attempt_3"]


@pytest.mark.processes
def test_what_is_kept_of_the_output_is_without_the_secrets_of_the_command(start, tmp_path):
    (tmp_path / "run.yaml").write_text("task_args: {logins: [{user: me, password: of the file}]}")
    script = SCRIPT + "print(sys.argv[1:], 'of the file')\n"
    assert start(script, 1, arguments=["run.yaml", "task_args.db_pwd=canary"]).wait().code == 0
    said = (tmp_path / "run/logs/attempt_1/p000/stdout.txt").read_text()
    assert said.splitlines()[-1] == "['run.yaml', 'task_args.db_pwd=***'] ***"


@pytest.mark.processes
def test_a_launcher_that_is_told_to_stop_starts_nothing_again(start):
    launched = start(SCRIPT + "os._exit(75) if me == 0 else time.sleep(60)\n", 2, max_restarts=5)
    deadline = time.monotonic() + 30
    for line in launched.popen.stderr:
        if "starting all processes again" in line:
            break
        assert time.monotonic() < deadline
    launched.popen.send_signal(signal.SIGTERM)
    result = launched.wait(timeout_s=20)
    assert result.code == 42
    assert result.err.splitlines()[-1] == "not started again: the launcher received a signal to stop"
