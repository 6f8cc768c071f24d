"""A clock that excludes pauses, for deadlines that a suspended job, a stopped process or a sleeping laptop must
survive."""

from __future__ import annotations

import time
from collections.abc import Callable

MOST_TICK_S = 1.0
"""The maximum that a pause of this process, or of its machine, counts."""


class RunningClock:
    """Seconds that this process has run, without the time in which it or its machine was suspended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._last, self.now = clock, clock(), 0.0

    def tick(self) -> float:
        """Returns the seconds until now. Call it several times a second."""
        now = self._clock()
        self.now += min(max(now - self._last, 0.0), MOST_TICK_S)
        self._last = now
        return self.now
