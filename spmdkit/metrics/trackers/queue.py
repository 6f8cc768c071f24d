"""`Trackers`: all trackers of a run. One thread, behind a bounded queue: a service that is slow or dead costs a warning
and never a step."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from spmdkit.errors import ConfigError, SpmdkitError
from spmdkit.foundation.timeouts import TRACKER_CLOSE_S
from spmdkit.metrics.trackers.base import Record, Tracker, nothing

MOST_WAITING = 1024

Open = Callable[[], Tracker]


class Trackers:
    """Writes records to every tracker that accepts them.

    The run's own record (`Tracker.own`) is written before `write` returns. The others follow in a thread: what finds
    the queue full is dropped, and a tracker that raises is disabled; `warn` reports both once.
    """

    def __init__(
        self, warn: Callable[[str], Any], most_waiting: int = MOST_WAITING, patience_s: float = TRACKER_CLOSE_S
    ):
        self._warn, self._patience_s = warn, patience_s
        self._own: list[Tracker] = []
        self._others: dict[str, Tracker] = {}
        self._dropped = 0
        self._back: int | None = None  # others have yet to go back to this step: the queue was full
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(most_waiting)
        self._thread: threading.Thread | None = None

    def add(self, name: str, open: Open) -> None:
        """Opens a tracker. A user's mistake in its options is raised; a service that does not respond costs a
        warning."""
        try:
            tracker = open()
        except SpmdkitError:
            raise
        except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - whatever a service raises
            self._given_up(name, error)
            return
        if not isinstance(tracker, Tracker):
            raise ConfigError(
                f"tracker {name}: open returned {type(tracker).__name__}. It opens one place to write to. Return "
                f"sk.Tracker(write)."
            )
        if tracker.own:
            self._own.append(tracker)
            return
        self._others[name] = tracker
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="spmdkit-trackers", daemon=True)
            self._thread.start()

    def write(self, record: Record, kind: str = "scalars") -> None:
        """Takes a record of host values."""
        for tracker in self._own:
            if kind in tracker.accepts:
                tracker.write(kind, record)
        if self._others:
            self._put(lambda tracker: tracker.write(kind, record) if kind in tracker.accepts else None)

    def flush(self) -> None:
        """Returns when the run's own record is on the disk. The others are not waited for."""
        for tracker in self._own:
            tracker.flush()

    def rewind(self, step: int) -> None:
        """Drops what is newer than `step`, everywhere. Others go back before they take another record."""
        for tracker in self._own:
            tracker.rewind(step)
        if self._others:
            self._back = step if self._back is None else min(self._back, step)
            self._put(nothing)

    def close(self) -> None:
        """Writes out what is left, and waits for others `patience_s` at most. May be called twice."""
        own, self._own = self._own, []
        for tracker in own:
            tracker.close()
        if self._thread is not None:
            thread, self._thread = self._thread, None
            self._stop(thread)
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._warn(
                f"trackers: {dropped} records were dropped: {', '.join(self._others)} took longer than the steps."
            )

    def _stop(self, thread: threading.Thread) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=self._patience_s)
            thread.join(self._patience_s)
        if thread.is_alive():
            names = ", ".join(self._others)
            self._warn(
                f"trackers: {names} did not take its last records within {self._patience_s:g} s. They are left out."
            )

    def _work_of(self, use: Callable[[Tracker], None]) -> Callable[[], None]:
        """Returns what the thread does: it goes back where that is due, and uses each tracker."""
        back = self._back

        def work() -> None:
            if back is not None:
                self._each(lambda tracker: tracker.rewind(back))
            self._each(use)

        return work

    def _put(self, use: Callable[[Tracker], None]) -> None:
        try:
            self._queue.put_nowait(self._work_of(use))
            self._back = None
        except queue.Full:
            if use is nothing:
                return
            if not self._dropped:
                self._warn(
                    f"trackers: {', '.join(self._others)} is slower than the steps. Records are dropped, training goes "
                    f"on."
                )
            self._dropped += 1

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
        self._work_of(lambda tracker: tracker.flush())()
        self._each(lambda tracker: tracker.close())

    def _each(self, use: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._others.items()):
            try:
                use(tracker)
            except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - whatever a service raises
                del self._others[name]
                self._given_up(name, error)

    def _given_up(self, name: str, error: BaseException) -> None:
        self._warn(
            f"tracker {name}: {type(error).__name__}: {str(error)[:200]}. Nothing more is written there, training goes "
            f"on."
        )
