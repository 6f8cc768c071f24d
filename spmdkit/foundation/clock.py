"""A clock that excludes pauses, for deadlines that must not expire while a job, process or laptop is suspended."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_TICK_S = 1.0
"""Maximum number of seconds that a pause of this process or its machine counts."""


class RunningClock:
    """Seconds that this process has run, without suspended time of the process or its machine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._last, self.now = clock, clock(), 0.0

    def tick(self) -> float:
        """Returns the seconds so far. Call it several times a second."""
        now = self._clock()
        self.now += min(max(now - self._last, 0.0), MAX_TICK_S)
        self._last = now
        return self.now
