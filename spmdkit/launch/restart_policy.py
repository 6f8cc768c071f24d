"""`Restarts`: whether what has ended is started again, and when. Pure."""

from __future__ import annotations

from spmdkit.errors import ExitCode
from spmdkit.foundation.timeouts import RESTART_FIRST_WAIT_S, RESTART_LONGEST_WAIT_S

FINAL = (
    0,
    ExitCode.CHECK_FAILED,
    2,  # the command line itself is wrong
    ExitCode.NOT_FINITE,
    ExitCode.CONFIG,
    ExitCode.CHECKPOINT,
    ExitCode.INTERRUPTED,
)
"""Codes that another start would end with again."""

MOST_IDLE = 3


class Restarts:
    """Counts the attempts of one launcher.

    A start after a preemption (42) costs nothing, any other one of `most`. Three attempts in a row after which no newer
    step was committed are the last. The wait doubles from 1 s to 60, and starts again where there was progress.
    """

    def __init__(self, most: int):
        self.left, self.why = most, ""
        self._may = most > 0
        self._idle = self._waits = 0
        self._newest = -1

    def after(self, code: int, newest: int | None, before: int | None = None) -> float | None:
        """Returns the seconds until the next attempt, None where there is none.

        Args:
            newest: the newest step that is committed by now.
            before: the newest when the attempt began; a run that the launcher found is no progress of its own.
        """
        if not self._may or code in FINAL:
            return None
        known = self._newest if before is None else max(self._newest, before)
        if newest is not None and newest > known:
            self._newest, self._idle, self._waits = newest, 0, 0
        elif code != ExitCode.PREEMPTED:
            self._idle += 1
        if self._idle >= MOST_IDLE:
            self.why = f"{MOST_IDLE} attempts in a row have committed no step"
            return None
        if code != ExitCode.PREEMPTED:
            if self.left == 0:
                self.why = "no restart is left (--max-restarts)"
                return None
            self.left -= 1
        self._waits += 1
        return min(RESTART_LONGEST_WAIT_S, RESTART_FIRST_WAIT_S * 2.0 ** (self._waits - 1))
