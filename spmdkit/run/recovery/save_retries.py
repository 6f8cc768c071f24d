"""The saves of a run. A failed save is logged and retried at the next interval; `checkpoint.max_failures` in a row end
the run with 74.

All processes decide together whether a save has failed, before the next one starts and at the end. Otherwise a process
could start a save that the others do not start, and block them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmdkit.checkpoint import Checkpoints
from spmdkit.errors import CheckpointWriteError
from spmdkit.foundation.timeouts import SAVE_BLOCKED_S, SAVE_RETRY_S, SLOW_SAVE_S
from spmdkit.metrics import EventLog
from spmdkit.run.hooks.base import RunView


def write_saved(events: EventLog, steps: Sequence[int]) -> None:
    """Writes the events of saved steps."""
    for step in steps:
        events.write("saved", step=step)


class Saves:
    """The results of the saves of a run. `on_failure`: called with the step of a failed save."""

    def __init__(self, run: RunView, checkpoints: Checkpoints, on_failure: Callable[[int | None], None]):
        self._run, self._checkpoints, self._on_failure = run, checkpoints, on_failure
        assert run.config.checkpoint is not None
        self._most = run.config.checkpoint.max_failures
        self._failed_steps: set[int] = set()  # known to all processes alike
        self._failures = 0
        self._owed: int | None = None  # a step that was to be saved, and is not committed yet
        self._began_at = 0.0
        self._slow_said = False

    def start(self, step: int, state: Any, record: Mapping[str, Any], metrics: Mapping[str, float] | None) -> bool:
        """Starts a save, after the previous one has ended; returns whether it was started.

        Raises:
            CheckpointWriteError: this save or the previous one was the last permitted failure.
        """
        self.settle()
        self._owed, self._began_at, self._slow_said = step, time.monotonic(), False
        try:
            self._checkpoints.save(step, state, record, metrics)
        except CheckpointWriteError as error:
            self._failed(str(error))
            return False
        return True

    def settle(self) -> None:
        """Waits for the save in flight, on every process, and records its result.

        Raises:
            CheckpointWriteError: it was the last permitted failure.
        """
        waiting_since = time.monotonic()
        ended = self._checkpoints.settle()
        if (held_s := time.monotonic() - waiting_since) > SAVE_BLOCKED_S:
            self._run.message(
                f"note: training waited {held_s:.1f} s for the checkpoint of step {self._owed} to be written: saves "
                f"are more frequent than the disk "
                "can write. Raise checkpoint.every_steps or every_seconds."
            )
        write_saved(self._run.events, self._checkpoints.new_commits())
        if ended.committed:
            self._owed, self._failures = None, 0
        if ended.why:
            self._failed(ended.why)

    def is_lost(self, step: int | None) -> bool:
        """Returns on every process whether the save of `step` has failed; waits for it where it is in flight. Raises as
        `settle`."""
        if step is not None and step == self._owed:
            self.settle()
        return step in self._failed_steps

    def note(self) -> None:
        """Reports, without waiting, the checkpoints that are committed and a slow one.

        Raises:
            CheckpointWriteError: as `settle`. With several processes only `settle` raises, at the same step.
        """
        if self._run.cluster.num_processes == 1 and not self._checkpoints.is_saving():
            self.settle()
        write_saved(self._run.events, self._checkpoints.new_commits())
        taken_s = time.monotonic() - self._began_at
        if self._checkpoints.is_saving() and taken_s > SLOW_SAVE_S and not self._slow_said:
            self._slow_said = True
            self._run.message(f"note: saving step {self._owed} has taken {taken_s:.0f} s so far: the disk is slow")
            self._run.events.write("save_slow", step=self._owed, seconds=round(taken_s))

    def finish(self, again: Callable[[], None]) -> None:
        """Returns when the last save of the run is committed; calls `again` after a failure.

        Raises:
            CheckpointWriteError: it has failed `checkpoint.max_failures` times.
        """
        self.settle()
        while self._owed is not None:
            time.sleep(SAVE_RETRY_S)
            again()
            self.settle()

    def _failed(self, why: str) -> None:
        run, self._failures = self._run, self._failures + 1
        self._failed_steps |= {self._owed} if self._owed is not None else set()
        self._on_failure(self._owed)
        run.events.write("save_failed", step=self._owed, failures=self._failures, error=why[:500])
        if self._failures >= self._most:
            often = (
                f" It failed {self._failures} times in a row (checkpoint.max_failures)." if self._failures > 1 else ""
            )
            raise CheckpointWriteError(f"{why}{often}")
        run.message(
            f"WARNING: {why} Training continues and saves again at the next interval ({self._failures} of "
            f"checkpoint.max_failures {self._most} in a row)."
        )
