"""Throughput per log interval, with an injected clock."""

import pytest

from spmdkit.metrics import Throughput


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def steps(meter, clock, first, last, seconds, wait_s=0.0):
    for step in range(first, last + 1):
        meter.tick(step, wait_s)
        clock.now += seconds


def test_an_interval_has_rate_time_and_wait(clock):
    meter = Throughput(32, clock)
    meter.start()
    steps(meter, clock, 1, 10, 0.5, wait_s=0.1)
    assert meter.snapshot(10) == pytest.approx({"examples_per_s": 64, "step_time_s": 0.5, "input_wait_s": 0.1})
    steps(meter, clock, 11, 14, 0.25)
    assert meter.snapshot(14) == pytest.approx({"examples_per_s": 128, "step_time_s": 0.25, "input_wait_s": 0})


def test_pauses_do_not_count(clock):
    meter = Throughput(32, clock)
    with meter.paused():
        clock.now += 30  # compiling, before the first step
    meter.start()
    steps(meter, clock, 1, 5, 1.0)
    with meter.paused():
        clock.now += 60
    steps(meter, clock, 6, 10, 1.0)
    assert meter.snapshot(10)["step_time_s"] == pytest.approx(1.0)
    meter.pause()
    meter.pause()
    clock.now += 60
    meter.resume()
    meter.resume()
    steps(meter, clock, 11, 12, 2.0)
    assert meter.snapshot(12)["step_time_s"] == pytest.approx(2.0)


def test_a_snapshot_splits_a_pause(clock):
    meter = Throughput(8, clock)
    meter.start()
    steps(meter, clock, 1, 4, 1.0)
    meter.pause()
    clock.now += 10
    assert meter.snapshot(4)["step_time_s"] == pytest.approx(1.0)
    clock.now += 10
    meter.resume()
    steps(meter, clock, 5, 6, 1.0)
    assert meter.snapshot(6)["step_time_s"] == pytest.approx(1.0)


def test_steps_dispatched_ahead_belong_to_the_next_interval(clock):
    meter = Throughput(10, clock)
    meter.start()
    for step in range(1, 8):
        meter.tick(step, wait_s=float(step))
    clock.now += 5
    assert meter.snapshot(5) == pytest.approx({"examples_per_s": 10, "step_time_s": 1, "input_wait_s": 3})
    clock.now += 2
    assert meter.snapshot(7) == pytest.approx({"examples_per_s": 10, "step_time_s": 1, "input_wait_s": 6.5})


def test_short_batches_count_their_own_examples(clock):
    meter = Throughput(10, clock)
    meter.start()
    meter.tick(1)
    meter.tick(2, examples=4)
    clock.now += 2
    assert meter.snapshot(2)["examples_per_s"] == pytest.approx(7)


def test_without_start_the_first_batch_begins_the_interval(clock):
    meter = Throughput(10, clock)
    steps(meter, clock, 1, 2, 1.0, wait_s=0.5)
    assert meter.snapshot(2)["step_time_s"] == pytest.approx(1.25)


def test_no_step_or_no_time_gives_nothing(clock):
    meter = Throughput(10, clock)
    assert meter.snapshot(0) == {}
    meter.tick(1)
    assert meter.snapshot(1) == {}


def test_tokens_and_trained_time_are_added():
    clock = Clock()
    meter = Throughput(8, clock)
    meter.start()
    for step in (1, 2):
        meter.tick(step, tokens=100)
    clock.now += 4
    assert meter.snapshot(2)["tokens_per_s"] == 50 and meter.trained_s == 4
    with meter.paused():
        clock.now += 10
    meter.tick(3)
    clock.now += 1
    assert "tokens_per_s" not in meter.snapshot(3) and meter.trained_s == 5
