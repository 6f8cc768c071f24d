"""`Standbys`: spare processes that have imported everything a run needs, and wait to replace a process that dies.

Each starts as a newcomer with a number below 0, and waits for a membership update (membership_file.py). After
`MAX_FAILURES` have exited while waiting, no more are started.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from spmdkit.launch.process import send
from spmdkit.launch.supervisor import Child

MAX_FAILURES = 3


class Standbys:
    """The standbys of one attempt.

    Attributes:
        adopted: the number of each standby in use -> the number of the process that it replaces.
    """

    def __init__(self, num: int, start: Callable[[int], Child]):
        self._num, self._start = num, start
        self._waiting: list[Child] = []
        self._started = self._failed = 0
        self.adopted: dict[int, int] = {}

    def fill(self) -> None:
        while len(self._waiting) < self._num and self._failed < MAX_FAILURES:
            self._started += 1
            self._waiting.append(self._start(-self._started))

    def adopt(self, process: int) -> tuple[int, Child] | None:
        """Returns (number, child) of the standby that has waited longest and now replaces `process`, or None."""
        while self._waiting:
            child = self._waiting.pop(0)
            if child.exit is None:
                number, child.process = child.process, process
                self.adopted[number] = process
                return number, child
        return None

    def lost(self, process: int) -> None:
        self.adopted = {number: each for number, each in self.adopted.items() if each != process}

    def has_ended(self, child: Child) -> bool:
        """Returns whether an exited child was a waiting standby."""
        if not child.is_standby:
            return False
        if child in self._waiting:
            self._waiting.remove(child)
            self._failed += 1
        return True

    def end(self) -> None:
        """Ends all waiting standbys when the job is done. No more are started."""
        waiting, self._waiting, self._num = self._waiting, [], 0
        for child in waiting:
            child.ended_by_us = True
            send(child.popen.pid, signal.SIGKILL)
