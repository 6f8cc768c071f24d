"""`Trackers`: all trackers of a run. One thread reads a bounded queue: a slow or dead service causes a warning and
never delays a step."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from spmdkit.errors import ConfigError, SpmdkitError
from spmdkit.foundation.timeouts import TRACKER_CLOSE_S
from spmdkit.metrics.trackers.base import Record, Tracker, names_of, nothing

MAX_QUEUED = 1024
REPAIR = "tensorboard, wandb, mlflow and comet show more kinds."

Open = Callable[[], Tracker]


class Trackers:
    """Writes records to every tracker that accepts them.

    The run's primary record (`Tracker.own`) is written before `write` returns. A thread writes the others: a record is
    dropped if the queue is full, and a tracker that raises is disabled. `warn` reports both once.
    """

    def __init__(self, warn: Callable[[str], Any], most_waiting: int = MAX_QUEUED, patience_s: float = TRACKER_CLOSE_S):
        self._warn, self._patience_s = warn, patience_s
        self._own: list[Tracker] = []
        self._others: dict[str, Tracker] = {}
        self._not_shown: set[tuple[str, str]] = set()  # (tracker, kind)
        self._dropped = 0
        self._back: int | None = None  # a pending rewind of the others to this step: the queue was full
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(most_waiting)
        self._thread: threading.Thread | None = None

    def add(self, name: str, open: Open) -> None:
        """Opens a tracker. An error in the user's options is raised; a service that does not respond causes a
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
        """Writes or queues a record of host values. A kind that a tracker does not accept is reported once."""
        for tracker in self._own:
            if kind in tracker.accepts:
                tracker.write(kind, record)
        shown = {name: kind in tracker.accepts for name, tracker in self._others.items()}
        if not (is_own := any(kind in tracker.accepts for tracker in self._own)):
            shown = shown or {"": False}
        for name in (name for name, is_shown in shown.items() if not is_shown and (name, kind) not in self._not_shown):
            self._not_shown.add((name, kind))
            subject = f"tracker {name} does not show" if name else "no tracker shows"
            others = " They are in files of the run." if is_own else f" {REPAIR}"
            self._warn(f"{subject} records of the kind {kind}: {', '.join(names_of(record, kind))}.{others}")
        if self._others:
            self._put(lambda tracker: tracker.write(kind, record) if kind in tracker.accepts else None)

    def flush(self) -> None:
        """Returns when the run's primary record is on disk. Does not wait for other trackers."""
        for tracker in self._own:
            tracker.flush()

    def rewind(self, step: int) -> None:
        """Drops records after `step` in all trackers. Queued trackers rewind before they write another record."""
        for tracker in self._own:
            tracker.rewind(step)
        if self._others:
            self._back = step if self._back is None else min(self._back, step)
            self._put(nothing)

    def close(self) -> None:
        """Writes the remaining records; waits at most `patience_s` for queued trackers. May be called twice."""
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
        patience_s = max([self._patience_s, *(t.close_s for t in self._others.values() if t.close_s is not None)])
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=self._patience_s)
            thread.join(patience_s)
        if thread.is_alive():
            names = ", ".join(self._others)
            self._warn(f"trackers: {names} did not take its last records within {patience_s:g} s. They are left out.")

    def _next_work(self, use: Callable[[Tracker], None]) -> Callable[[], None]:
        """Returns the work of the thread: a rewind if one is pending, then `use` of each tracker."""
        back = self._back

        def work() -> None:
            if back is not None:
                self._each(lambda tracker: tracker.rewind(back))
            self._each(use)

        return work

    def _put(self, use: Callable[[Tracker], None]) -> None:
        try:
            self._queue.put_nowait(self._next_work(use))
            self._back = None
        except queue.Full:
            if use is nothing:
                return
            if not self._dropped:
                self._warn(
                    f"trackers: {', '.join(self._others)} is slower than the steps. Records are dropped, training "
                    "continues."
                )
            self._dropped += 1

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
        self._next_work(lambda tracker: tracker.flush())()
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
            f"tracker {name}: {type(error).__name__}: {str(error)[:200]}. Nothing more is written there, training "
            "continues."
        )
