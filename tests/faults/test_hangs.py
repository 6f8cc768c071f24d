"""Jobs that hang, freeze, lose a process or are suspended as a whole: real processes, one fault each, and how long it
takes to end."""

import faulthandler
import os
import signal
import time

import pytest

from spmdkit.tools.drill import clock

pytestmark = pytest.mark.processes


def stop(pids, number):
    for pid in pids:
        os.kill(pid, number)


def test_hanging_data_ends_with_76_and_every_stack(job):
    ended = job.end_of(job.train("watchdog.step_timeout_s=3", n=2, faults={1: ["data sleep", 12]}))
    assert job.fired(), ended.output
    assert ended.code == 76, ended.output
    assert ended.after_s >= 3
    assert "no progress: p1 has been reading data for" in ended.output
    assert "p0 waits in the step" in ended.output
    assert "watchdog.step_timeout_s" in ended.output and "The newest checkpoint is of step" in ended.output
    told = (job.folder / "run" / "logs" / "stacks.txt").read_text()
    assert told.index("process 1, training thread:") < told.index("process 0, training thread:")
    assert "time.sleep(600)" in told, "the source's own line"
    assert {e["code"] for e in job.events() if e["event"] == "fault"} == {76}
    assert ended.output.rstrip().splitlines()[-1].startswith("no progress: p1")
    assert job.processes() == {}


@pytest.mark.slow
def test_single_process_ends_its_own_hang(job):
    ended = job.end_of(job.train("watchdog.step_timeout_s=2", "run_dir=a", faults={0: ["data sleep", 12]}))
    assert (ended.code, bool(job.fired())) == (76, True), ended.output
    assert "no progress: p0 has been reading data" in ended.output and "time.sleep(600)" in ended.output
    (job.folder / "fired-0").unlink()
    ended = job.end_of(job.train("watchdog.interpreter_timeout_s=3", "run_dir=b", faults={0: ["hook gil", 7]}))
    assert (ended.code, bool(job.fired())) == (1, True), ended.output
    assert "Timeout (0:00:03)!" in ended.output and 'task.py", line' in ended.output


@pytest.mark.parametrize(
    ("phase", "n", "options", "found"),
    [
        ("save", 1, [], "p0 has been saving for 3 s"),
        pytest.param(
            "evaluation",
            2,
            ["eval.every_steps=5"],
            "p1 has been evaluating (reading data) for 3 s at step 6; p0 is",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["save", "evaluation"],
)
def test_hang_in_a_save_or_evaluation_is_76(job, phase, n, options, found):
    options = [f"watchdog.{phase}_timeout_s=3", *options]
    ended = job.end_of(job.train(*options, n=n, faults={n - 1: [phase, 0]}, EVALUATED="1"))
    assert (ended.code, bool(job.fired())) == (76, True), ended.output
    assert f"no progress: {found}" in ended.output


@pytest.mark.slow
def test_hang_without_a_launcher_is_76_on_both(job):
    for ended in [job.end_of(p) for p in job.by_hand("watchdog.step_timeout_s=3", faults={1: ["data sleep", 12]})]:
        assert (ended.code, bool(job.fired())) == (76, True), ended.output
        assert "no progress: p1 has been reading data for" in ended.output


def test_held_interpreter_under_launch_is_76(job):
    launch = ("launch", "-n", "1", "--", "train", "run.yaml", "watchdog.interpreter_timeout_s=3")
    ended = job.end_of(job.start(*launch, faults={0: ["hook gil", 7]}))
    assert (ended.code, bool(job.fired())) == (76, True), ended.output
    assert "process 0 runs no Python since" in ended.output.splitlines()[-1]
    assert '[0]   File "' in ended.output and "in act" in ended.output
    assert job.processes() == {}


@pytest.mark.parametrize("frozen", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_stopped_process_is_75_and_named(job, frozen):
    child = job.train("watchdog.heartbeat_timeout_s=4", n=2)
    job.wait_for(lambda: len(job.steps()) > 2)
    stop([job.processes()[frozen]], signal.SIGSTOP)
    (job.folder / "fired-x").write_text(f"{time.monotonic()}")
    ended = job.end_of(child)
    assert ended.code == 75, ended.output
    assert ended.after_s > 3
    last = ended.output.rstrip().splitlines()[-2:]
    assert (
        last[0] == f"process {frozen} is at fault, reports process {1 - frozen} "
        "(exit code 75, rendezvous, a peer or the object store timed out):"
    )
    assert last[1].startswith(f"process {frozen} is silent: no sign of life")
    assert job.processes() == {}


@pytest.mark.parametrize(
    ("kind", "who", "n", "code"),
    [
        pytest.param("raise", 1, 4, 70, marks=pytest.mark.slow),
        pytest.param("kill", 1, 4, 137, marks=pytest.mark.slow),
        ("kill", 0, 2, 137),
    ],
)
def test_error_or_kill_ends_all_processes(job, kind, who, n, code):
    """Of four one is no neighbor of the dead one in Gloo's ring."""
    ended = job.end_of(job.train(n=n, faults={who: [f"hook {kind}", 7]}))
    assert (ended.code, bool(job.fired())) == (code, True), ended.output
    assert f"process {who} failed first" in ended.output
    cause = "ended by SIGKILL" if kind == "kill" else "hook 'mine': before_step raised ValueError"
    for other in set(range(n)) - {who}:
        assert f"[{other}] process {who} ended with exit code {code}: {cause}" in ended.output
    assert "Check failure stack trace" not in ended.output
    assert job.processes() == {}


def test_kill_of_process_0_without_a_launcher(job):
    """The coordination service in its own process reports that, and then ends."""
    first, *others = job.by_hand(faults={0: ["hook kill", 7]})
    for ended in map(job.end_of, others):
        assert (ended.code, bool(job.fired())) == (75, True), ended.output
        assert ended.output.rstrip().splitlines()[-2].startswith("process 0 is gone: it ended without an error report")
    assert job.end_of(first).code == 137
    job.wait_for(lambda: not job.service_processes())


@pytest.mark.parametrize("by_hand", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kill_of_the_coordination_service_is_75(job, by_hand):
    """Each process reports it in one line, and no C++ stack is printed."""
    children = job.by_hand() if by_hand else [job.train(n=2)]
    job.wait_for(lambda: len(job.steps()) > 2)
    (service,) = job.service_processes()
    (job.folder / "fired-x").write_text(f"{time.monotonic()}")
    os.kill(service, signal.SIGKILL)
    for ended in map(job.end_of, children):
        assert ended.code == 75, ended.output
        assert ended.after_s < 5, "no process waits for a timeout"
        assert ended.output.count("the coordination service has ended (its process was killed") >= 1
        assert "Check failure stack trace" not in ended.output and "SIGABRT" not in ended.output, ended.output
        assert "The newest checkpoint is of step" in ended.output or "No checkpoint was saved yet." in ended.output
    assert [e["code"] for e in job.events() if e["event"] == "fault"] == [75, 75]
    assert job.processes() == {}


@pytest.mark.parametrize(
    ("n", "paused_s", "shifts"),
    [
        (2, 9, (3600, -3600)),
        pytest.param(2, 300, (3600, 3606, 86400, -3600), marks=pytest.mark.slow),
        pytest.param(1, 300, (3600, -3600), marks=pytest.mark.slow),
    ],
)
def test_suspended_job_with_a_shifted_clock_continues(job, n, paused_s, shifts):
    """For longer than every limit: 8 s, and 60 in the long form, in which the coordination service goes on: its gRPC
    would give up clients that do not answer for 60 s (cluster/service/grpc_relay.py)."""
    faulthandler.dump_traceback_later(paused_s + 300, exit=True)  # the limit of a test is five minutes
    if missing := clock.missing_compiler():
        pytest.skip(missing)
    library, shift = (job.folder / name for name in ("clock.so", "shift"))
    clock.compile_library(library)
    names = ("heartbeat_timeout_s", "step_timeout_s", "save_timeout_s", *(["interpreter_timeout_s"] if n > 1 else []))
    limits = [f"watchdog.{name}={8 if paused_s < 60 else 60}" for name in names]
    child = job.train(*limits, n=n, fresh=True, LD_PRELOAD=str(library), SPMDKIT_CLOCK_FILE=str(shift))
    job.wait_for(lambda: len(job.steps()) > 2)
    for seconds in shifts:
        before = len(job.steps())
        shift.write_text(str(seconds))
        job.wait_for(lambda: len(job.steps()) > before + 1)  # noqa: B023
    hours = {event["time"][:13] for event in job.events()}
    assert len(hours) > 1, "the clock was not set"
    service_processes = job.service_processes()
    assert len(service_processes) == (n > 1)
    pids = [child.pid, *job.processes().values(), *(service_processes if paused_s < 60 else [])]
    stop(pids, signal.SIGSTOP)
    time.sleep(paused_s)
    before = len(job.steps())
    stop(pids, signal.SIGCONT)
    job.wait_for(lambda: len(job.steps()) > before + 3)
    time.sleep(1.5)
    child.send_signal(signal.SIGTERM)
    ended = job.end_of(child)
    assert ended.code == 42, ended.output
    assert job.processes() == {}


@pytest.mark.slow
def test_slow_phases_are_no_hang(job):
    """Each takes 3 s on one process, where a step may take 1.5 s."""
    ended = job.end_of(
        job.train(
            "watchdog.step_timeout_s=1.5",
            "watchdog.heartbeat_timeout_s=10",
            "steps=12",
            "eval.every_steps=6",
            n=2,
            faults={0: ["slow", 0], 1: ["slow", 3]},
            EVALUATED="1",
        )
    )
    assert ended.code == 0, ended.output
    assert job.steps()[-1] == 12


@pytest.mark.slow
def test_straggler_is_named_and_continues(job):
    child = job.train(n=2, faults={1: ["drag", 0.2]})
    job.wait_for(lambda: any(event["event"] == "straggler" for event in job.events()))
    said = next(event for event in job.events() if event["event"] == "straggler")
    assert said["text"].startswith("process 1 holds up the others: the hook 'mine' takes")
    before = len(job.steps())
    job.wait_for(lambda: len(job.steps()) > before)
    child.send_signal(signal.SIGTERM)
    assert job.end_of(child).code == 42
