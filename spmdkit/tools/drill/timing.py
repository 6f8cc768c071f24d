"""When a random fault comes: any process, any phase. Pure, from a seed.

A quarter comes while the processes start (import, rendezvous, compile, restore), a quarter while a save is written, and
half at a step, at once or a part of a step later, so in the middle of a collective too. Of three attempts in a row that
commit no step the launcher takes the third for the last (launch/restart_policy.py), and rightly: so two such are hurt
as they come, and the third only once it has committed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

MOST_IDLE = 2
LATE_STEPS = 2.0
"""A delay within a step is drawn up to so many steps' time: several may be in flight."""
SAVE_S = 0.3
"""A delay after the beginning of a save is drawn up to this."""


@dataclass(frozen=True)
class Pace:
    """What the undisturbed run took: seconds until the first step, of a step, and steps between two saves."""

    start_s: float
    step_s: float
    save_steps: int


@dataclass(frozen=True)
class Moment:
    """When a fault comes within an attempt.

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
        newest: the step from which the attempt goes on.
        steps_left: of the run.
        faults_left: that are still to come, this one too.
        idle: attempts in a row that have committed nothing.
    """
    kind = rng.random()
    late_s = rng.uniform(0, LATE_STEPS * pace.step_s)
    if idle >= MOST_IDLE:
        return Moment("save", rng.uniform(0, SAVE_S), 2)
    if kind < 0.25:
        return Moment("start", rng.uniform(0, pace.start_s))
    if kind < 0.5:
        return Moment("save", rng.uniform(0, SAVE_S), 1)
    farthest = max(1, min(2 * pace.save_steps, 2 * steps_left // max(1, faults_left), steps_left - 1))
    return Moment("step", late_s, newest + rng.randint(1, farthest))
