"""When a random fault is injected: any process, any phase, drawn from a seed.

A quarter is injected while the processes start (import, rendezvous, compile, restore), a quarter while a save is
written, and half at a step or a fraction of a step later, so also during a collective. The launcher gives up after
three attempts in a row that commit no step (launch/restart_policy.py). After two such attempts the next fault is
therefore injected only after a commit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

MAX_ATTEMPTS_WITHOUT_COMMIT = 2
MAX_DELAY_STEPS = 2.0
"""Maximum delay after the beginning of a step, in step times: several steps may be in flight."""
SAVE_S = 0.3
"""Maximum delay after the beginning of a save."""


@dataclass(frozen=True)
class Pace:
    """The undisturbed run: seconds until the first step, seconds per step, and steps between two saves."""

    start_s: float
    step_s: float
    save_steps: int


@dataclass(frozen=True)
class Moment:
    """When a fault is injected within an attempt.

    Attributes:
        at: "start" (`delay_s` after the processes were started), "step" (`delay_s` after step `number` was begun), or
            "save" (`delay_s` after save `number` of the attempt has begun: by then the one before is committed).
    """

    at: str
    delay_s: float = 0.0
    number: int = 0


def draw(rng: random.Random, pace: Pace, newest: int, steps_left: int, faults_left: int, idle: int) -> Moment:
    """Returns the moment of the next random fault.

    Args:
        newest: the step from which the attempt resumes.
        steps_left: of the run.
        faults_left: not injected yet, this one included.
        idle: attempts in a row without a commit.
    """
    kind = rng.random()
    late_s = rng.uniform(0, MAX_DELAY_STEPS * pace.step_s)
    if idle >= MAX_ATTEMPTS_WITHOUT_COMMIT:
        return Moment("save", rng.uniform(0, SAVE_S), 2)
    if kind < 0.25:
        return Moment("start", rng.uniform(0, pace.start_s))
    if kind < 0.5:
        return Moment("save", rng.uniform(0, SAVE_S), 1)
    farthest = max(1, min(2 * pace.save_steps, 2 * steps_left // max(1, faults_left), steps_left - 1))
    return Moment("step", late_s, newest + rng.randint(1, farthest))
