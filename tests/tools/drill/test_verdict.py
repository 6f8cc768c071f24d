"""The verdict of a drill: which events and exits detect a fault, and when training has recovered. Without a run."""

import json
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from spmdkit.faults.injection.fault import Fault
from spmdkit.faults.injection.inject import FaultInjector
from spmdkit.foundation.constants import DRILL_FILE
from spmdkit.launch.root_cause import Exit
from spmdkit.tools.drill import command, driver, figures
from spmdkit.tools.drill.driver import Driver


class Job:
    """A drill of one process that begins steps on request, with one fault at step 2."""

    def __init__(self, run_dir, kind):
        self.run_dir, self.step = run_dir, 1
        self.drill = Driver(run_dir, 1, [Fault(kind, 0, 2)])
        self.start()

    def start(self):
        variables, _ = self.drill.process_env(0)
        self.injector = FaultInjector(variables[DRILL_FILE])
        step = SimpleNamespace(read=lambda: json.dumps({"step": self.step}).encode())
        fields = {"last_beat": {"phase": "step"}, "step": step, "exit": None, "is_removed": False, "is_standby": False}
        self.child = SimpleNamespace(process=0, **fields)
        self.poll()

    def poll(self):
        self.drill.on_poll([self.child])

    def inject(self):
        """Begins step 2 with the fault; the drill reads that at the next poll."""
        if self.drill._pending.fault.kind == "disk-full":
            self.step = 2
            self.poll()
        else:
            self.injector._step = 2
            self.injector._write_result(self.drill._pending.number)

    def event(self, name, **fields):
        line = {"event": name, "time": datetime.now(UTC).isoformat(), "process": 0, **fields}
        with (self.run_dir / "events.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def report(self, name, at):
        """Reports an event of step 2 when step `at` has begun."""
        self.event(name, step=2)
        self.step = at
        self.poll()

    def end(self, code, message="no"):
        self.child.exit = Exit(0, code, 0, message=message)
        self.poll()
        self.drill.on_exit([self.child], None)

    @property
    def injection(self):
        return self.drill.injections[0]


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "step_of", lambda raw: json.loads(raw)["step"])
    monkeypatch.setattr(driver, "_set_file_limit", lambda *_: None)
    jobs = []
    yield lambda kind: jobs.append(Job(tmp_path, kind)) or jobs[-1]
    for started in jobs:
        started.drill.close()


def test_event_between_two_polls_detects_its_fault(job):
    job = job("nan")
    job.inject()
    job.report("skipped", at=3)
    job.poll()
    assert job.injection.detected_by == "the event 'skipped'" and job.injection.recovered is not None


@pytest.mark.parametrize(
    ("kind", "event", "detects"),
    [
        ("nan", "nonfinite", True),
        ("nan", "rolled_back", True),
        ("nan", "straggler", False),
        ("nan", "save_failed", False),
        ("bit-flip", "replicas_differ", True),
        ("bit-flip", "skipped", False),
        ("disk-full", "save_failed", True),
        ("disk-full", "straggler", False),
        ("slow", "straggler", True),
        ("slow", "save_failed", False),
        ("kill", "fault", True),
        ("kill", "straggler", False),
        ("corrupt", "checkpoint_quarantined", True),
        ("corrupt", "fault", False),
    ],
)
def test_fault_is_detected_by_its_events(kind, event, detects, job):
    job = job(kind)
    job.inject()
    job.poll()
    job.event(event, step=2)
    job.poll()
    assert (job.injection.detected is not None) == detects


def test_run_that_ended_has_not_recovered(job):
    job = job("nan")
    job.inject()
    job.report("nonfinite", at=4)
    assert job.injection.recovered is not None, "steps are in flight"
    job.end(77, "not finite at step 2")
    row = figures.injection_row(job.injection, 0.0)
    assert (row["recovery_s"], row["exit_code"], row["named"]) == (None, 77, [0])
    assert (
        figures.summary(job.drill.injections, job.drill.attempts, job.drill.attempts, finished=False)["goodput"] is None
    )


def test_disk_that_ended_an_attempt_recovers_after_the_restart(job):
    job = job("disk-full")
    job.inject()
    job.step = 3
    job.poll()
    assert job.injection.detected is None
    job.end(74)
    assert job.injection.detected_by == "the exit of process 0" and job.injection.recovered is None
    job.step = 1
    job.start()
    job.poll()
    assert job.injection.recovered is None, "step 3 is not passed"
    job.step = 4
    job.poll()
    assert job.injection.recovered is not None and job.injection.exit_code == 74


@pytest.mark.parametrize(
    ("kind", "code", "detects"), [("nan", 70, False), ("bit-flip", 75, False), ("kill", 137, True)]
)
def test_exit_detects_the_faults_that_end_a_process(kind, code, detects, job):
    job = job(kind)
    job.inject()
    job.poll()
    job.end(code)
    assert (job.injection.detected is not None) == detects


@pytest.mark.parametrize("kind", ["nan", "bit-flip", "disk-full", "truncate", "corrupt"])
def test_undetected_fault_fails_the_drill(kind, job):
    job = job(kind)
    job.inject()
    job.poll()
    why = command._failures(job.drill, 0, "", "")
    assert len(why) == 1 and f"fault 1, {kind}:0@2, was never detected" in why[0]
