"""`Restarts`: whether and when an ended job is restarted. Pure."""

from __future__ import annotations

from spmdkit.errors import FINAL, ExitCode
from spmdkit.foundation.timeouts import RESTART_FIRST_WAIT_S, RESTART_LONGEST_WAIT_S

MAX_IDLE = 3


class Restarts:
    """Counts the attempts of one launcher.

    A restart after a preemption (42) is not counted, any other one counts toward `most`. There is no restart after
    three consecutive attempts without a newly committed step. The delay doubles from 1 s to 60, and progress resets it.
    """

    def __init__(self, most: int):
        self.num_remaining, self.why = most, ""
        self._may = most > 0
        self._idle = self._waits = 0
        self._newest = -1

    def next_delay_s(self, code: int, newest: int | None, before: int | None = None) -> float | None:
        """Returns the seconds until the next attempt, None if there is none.

        Args:
            newest: the newest committed step.
            before: the newest step when the attempt began; an existing run does not count as progress.
        """
        if not self._may or code in (ExitCode.DONE, *FINAL):
            return None
        known = self._newest if before is None else max(self._newest, before)
        if newest is not None and newest > known:
            self._newest, self._idle, self._waits = newest, 0, 0
        elif code != ExitCode.PREEMPTED:
            self._idle += 1
        if self._idle >= MAX_IDLE:
            self.why = f"{MAX_IDLE} attempts in a row have committed no step"
            return None
        if code != ExitCode.PREEMPTED:
            if self.num_remaining == 0:
                self.why = "no restart is left (--max-restarts)"
                return None
            self.num_remaining -= 1
        self._waits += 1
        return min(RESTART_LONGEST_WAIT_S, RESTART_FIRST_WAIT_S * 2.0 ** (self._waits - 1))
