"""`Deadline` on a virtual clock, and the table of timeouts."""

import re
from pathlib import Path

import pytest

import spmdkit
from spmdkit.foundation import timeouts
from spmdkit.foundation.deadline import Deadline

PACKAGE = Path(spmdkit.__file__).parent
STANDALONE = ("cluster/service/service.py", "cluster/service/grpc_relay.py", "tools/drill/virtual_switch.py")
"""Run by their path, without the package."""
NO_WAITS = {
    "mesh/chips.py",  # latencies of links
    "foundation/clock.py",  # the most that a pause counts
    "faults/injection/fault.py",  # sizes of faults
    "faults/preemption_sources/aws.py",  # how long a token is valid
    "plan/fit_check.py",  # the interpreter's switch interval
    "run/startup/health_checks/outliers.py",  # the most that two clocks may differ
    "tools/start.py",  # the smallest import that is a row
    "tools/tune/search.py",  # for how long a variant is measured
    "tools/tune/measure.py",  # the length of a block of steps
    "tools/doctor.py",  # units, and the most that may be requested
    "tools/drill/network.py",  # a delay of packets
    "tools/drill/timing.py",  # a delay that is drawn
    "metrics/progress_bar.py",  # a rate
}


class Clock:
    def __init__(self):
        self.now, self.slept = 100.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def test_polls_end_at_the_deadline():
    clock = Clock()
    polls = [clock.now for _ in Deadline(1.0, clock, clock.sleep).polls(0.4)]
    assert polls == pytest.approx([100.0, 100.4, 100.8, 101.0])
    assert [clock.now for _ in Deadline(0.0, clock, clock.sleep).polls(0.4)] == [clock.now]


@pytest.mark.parametrize(("ready_at", "expected"), [(100.0, True), (100.7, True), (101.0, True), (101.5, False)])
def test_wait_for_returns_the_first_true_value(ready_at, expected):
    clock = Clock()
    deadline = Deadline(1.0, clock, clock.sleep)
    assert deadline.wait_for(lambda: clock.now >= ready_at, 0.25) is expected
    assert clock.now <= 101.0 + 1e-3


def test_remaining_time_is_never_zero():
    clock = Clock()
    deadline = Deadline(1.0, clock, clock.sleep)
    assert deadline.remaining_s == 1.0 and not deadline.expired
    clock.now += 5
    assert deadline.remaining_s == 0.001 and deadline.expired


def test_every_timeout_is_in_the_table():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name == "foundation/timeouts.py" or name in STANDALONE or name in NO_WAITS:
            continue
        text = path.read_text()
        found += [f"{name}: {line}" for line in re.findall(r"^[A-Z][A-Z_, ]*_S\b[^=\n]* = [\d.].*$", text, re.M)]
    assert found == []


def test_every_timeout_is_used():
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "timeouts.py"]
    words = {word for path in files for word in re.findall(r"\b[A-Z_]+_S\b", path.read_text())}
    names = [name for name in vars(timeouts) if name.endswith("_S")]
    assert len(names) > 70 and set(names) <= words
