"""`Deadline`: the end of a bounded wait. Every waiting loop of the package uses one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Deadline:
    """The time `timeout_s` seconds from now.

    Args:
        timeout_s: seconds; with 0 or less it has already expired.
        clock: monotonic seconds.
        sleep: the function that waits between two polls.
    """

    def __init__(
        self,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._clock, self._sleep = clock, sleep
        self._end = clock() + timeout_s

    @property
    def remaining_s(self) -> float:
        """The remaining seconds, at least 1 ms, since a socket with a timeout of 0 does not block."""
        return max(0.001, self._end - self._clock())

    @property
    def expired(self) -> bool:
        """Whether no time remains."""
        return self._clock() >= self._end

    def polls(self, interval_s: float) -> Iterator[None]:
        """Yields immediately, then every `interval_s` seconds, and a last time when the deadline has expired."""
        while True:
            is_last = self.expired
            yield
            if is_last:
                return
            self._sleep(min(interval_s, self.remaining_s))

    def wait_for(self, condition: Callable[[], T], interval_s: float) -> T:
        """Polls `condition` and returns its first true value, or its last value when the deadline expires."""
        for _ in self.polls(interval_s):
            if value := condition():
                break
        return value
