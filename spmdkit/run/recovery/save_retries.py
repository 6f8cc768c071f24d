"""The saves of a run. A failed save is logged and retried at the next interval; `checkpoint.max_failures` failures in a
row end the run with 74.

All processes agree whether a save failed before the next one starts and at the end of the run. Otherwise a process
could start a save alone and block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from spmdkit.checkpoint import Checkpoints
from spmdkit.errors import CheckpointWriteError
from spmdkit.foundation.timeouts import SAVE_BLOCKED_S, SAVE_RETRY_S, SLOW_SAVE_S
from spmdkit.run.hooks.base import RunView


class Saves:
    """The saves of a run, from start to agreed result.

    Attributes:
        tried_at: the time of the last attempt, by `clock`; initially the time of the start.
    """

    def __init__(self, run: RunView, checkpoints: Checkpoints, clock: Callable[[], float]):
        self._run, self._checkpoints, self._clock = run, checkpoints, clock
        assert run.config.checkpoint is not None
        self._most = run.config.checkpoint.max_failures
        self._failed_steps: set[int] = set()  # the same on all processes
        self._failures = 0
        self._slow_step: int | None = None
        self._held_s = 0.0  # training has waited this long for saves since the last event
        self._held_since: float | None = None
        self.tried_at = clock()
        checkpoints.on_commit = self._note_commit

    def start(self, step: int, state: Any, record: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> bool:
        """Starts a save after the previous one has ended; returns whether it was started. Raises CheckpointWriteError
        if this or the previous save reached the maximum number of failures."""
        self.finish_save()
        self.tried_at = self._clock()
        try:
            with self._holds_training():
                self._checkpoints.save(step, state, record, metrics)
        except CheckpointWriteError as error:
            self._failed(str(error))
            return False
        return True

    def finish_save(self) -> None:
        """Waits for the save in flight, on every process, and records its result. Raises CheckpointWriteError if it
        reached the maximum number of failures."""
        step, waiting_since = self._checkpoints.unfinished_step, time.monotonic()
        with self._holds_training():
            ended = self._checkpoints.finish_save()
        if (held_s := time.monotonic() - waiting_since) > SAVE_BLOCKED_S:
            self._run.message(
                f"note: training waited {held_s:.1f} s for the checkpoint of step {step} to be written: saves are more "
                "frequent than the disk can write. Raise checkpoint.every_steps or every_seconds."
            )
        if ended.committed:
            self._failures = 0
        if ended.why:
            self._failed(ended.why)

    def close(self) -> None:
        """Waits for the save in flight. Raises CheckpointWriteError if it failed."""
        with self._holds_training():
            self._checkpoints.close()

    @contextmanager
    def _holds_training(self) -> Iterator[None]:
        self._held_since = self._clock()
        try:
            yield
        finally:
            held_since, self._held_since = self._held_since, None
            self._held_s += self._clock() - held_since

    def _note_commit(self, step: int) -> None:
        """Writes the event of a commit, in the thread that commits: training may hang, or this process be killed."""
        now, held_s, self._held_s = self._clock(), self._held_s, 0.0
        if self._held_since is not None:
            held_s += now - self._held_since
            self._held_since = now
        seconds = round(now - self.tried_at, 3)
        self._run.events.write("saved", step=step, seconds=seconds, held_s=round(held_s, 3))

    def is_lost(self, step: int | None) -> bool:
        """Returns, the same on every process, whether the save of `step` failed; waits for it if it is in flight.
        Raises like `finish_save`."""
        if step is not None and step == self._checkpoints.unfinished_step:
            self.finish_save()
        return step in self._failed_steps

    def note(self) -> None:
        """Reports a slow save, without waiting. Raises CheckpointWriteError like `finish_save`. With several processes
        only `finish_save` raises, at the same step."""
        if self._run.cluster.num_processes == 1 and not self._checkpoints.is_saving():
            self.finish_save()
        step, taken_s = self._checkpoints.unfinished_step, self._clock() - self.tried_at
        if self._checkpoints.is_saving() and taken_s > SLOW_SAVE_S and self._slow_step != step:
            self._slow_step = step
            self._run.message(f"note: saving step {step} has taken {taken_s:.0f} s so far: the disk is slow")
            self._run.events.write("save_slow", step=step, seconds=round(taken_s))

    def finish(self, again: Callable[[], None]) -> None:
        """Returns when the last save of the run is committed; calls `again` after a failure. Raises
        CheckpointWriteError after `checkpoint.max_failures` failures."""
        self.finish_save()
        while self._checkpoints.unfinished_step is not None:
            time.sleep(SAVE_RETRY_S)
            again()
            self.finish_save()

    def _failed(self, why: str) -> None:
        run, step, self._failures = self._run, self._checkpoints.unfinished_step, self._failures + 1
        if step is not None:
            self._failed_steps.add(step)
        run.events.write("save_failed", step=step, failures=self._failures, error=why[:500])
        if self._failures >= self._most:
            often = f" It failed {self._failures} times in a row (checkpoint.max_failures)." * (self._failures > 1)
            raise CheckpointWriteError(f"{why}{often}")
        run.message(
            f"WARNING: {why} Training continues and saves again at the next interval ({self._failures} of "
            f"checkpoint.max_failures {self._most} in a row)."
        )
