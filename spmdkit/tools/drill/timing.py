"""When a random fault is injected: any process, any phase, drawn from a seed.

A quarter is injected while the processes start, a quarter while a save is written, and half up to two step times after
a step. The launcher gives up after three consecutive attempts without a committed step (launch/restart_policy.py), so
after two such attempts the next fault is injected only after a commit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

MAX_ATTEMPTS_WITHOUT_COMMIT = 2
MAX_DELAY_STEPS = 2.0
"""Maximum delay after the beginning of a step, in step times: several steps may be in flight."""
SAVE_S = 0.3
"""Maximum delay after the beginning of a save; at most half of the rest of the run, which could end before it."""


@dataclass(frozen=True)
class Pace:
    """The durations of the undisturbed run."""

    start_s: float  # seconds until the first step
    step_s: float
    save_steps: int  # steps between two saves


@dataclass(frozen=True)
class Moment:
    """When a fault is injected within an attempt."""

    at: str  # start, step, save or phase; at a save, the previous save is committed
    delay_s: float = 0.0  # seconds after it
    number: int = 0  # of the step, or of the save in the attempt; the first step of a phase


def draw(rng: random.Random, pace: Pace, newest: int, steps_left: int, faults_left: int, idle: int) -> Moment:
    """Returns the moment of the next random fault.

    Args:
        newest: the step from which the attempt resumes.
        steps_left, faults_left: of the run, this fault included.
        idle: consecutive attempts without a commit.
    """
    kind = rng.random()
    late_s = rng.uniform(0, MAX_DELAY_STEPS * pace.step_s)
    if idle >= MAX_ATTEMPTS_WITHOUT_COMMIT:
        return Moment("save", rng.uniform(0, SAVE_S), 2)
    if kind < 0.25:
        return Moment("start", rng.uniform(0, pace.start_s))
    if kind < 0.5:
        return Moment("save", rng.uniform(0, min(SAVE_S, pace.step_s * steps_left / 2)), 1)
    farthest = max(1, min(2 * pace.save_steps, 2 * steps_left // max(1, faults_left), steps_left - 1))
    return Moment("step", late_s, newest + rng.randint(1, farthest))
