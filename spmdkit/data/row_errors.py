"""How a user's examples are read: by default by one thread, with retries, and with a limit on skipped rows.

A row that cannot be read after all retries may be skipped. If batches can be short (`drop_remainder: false`), its
position is padded. Otherwise the next readable row replaces it, and counts twice in that batch. A checkpoint stores the
skipped rows as (number of the batch, row), so that a restart skips the same rows, even if they can be read again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmdkit.errors import SpmdkitError
from spmdkit.foundation.timeouts import ROW_RETRY_FIRST_S, ROW_RETRY_LONGEST_S

_read_lock = threading.RLock()
"""For all data of this process, since training and evaluation may share a file and its position."""


class SkippedRows:
    """Records skipped rows of batches, and retries. Thread-safe.

    Args:
        limit: the maximum number of skipped rows.
        what: names the data in messages.
    """

    def __init__(self, limit: int = 0, what: str = "train_data"):
        self.limit, self.what = limit, what
        self._lock = threading.Lock()
        self._places: set[tuple[int, int]] = set()
        self._news: list[dict[str, Any]] = []

    @property
    def rows(self) -> list[int]:
        """The skipped rows without duplicates."""
        return sorted({row for _, row in self._places})

    def has(self, batch: int, row: int) -> bool:
        """Returns whether `row` is skipped in batch number `batch`."""
        return (batch, row) in self._places

    def skip(self, batch: int, row: int, error: BaseException) -> bool:
        """Skips a row, and returns whether the limit allows it."""
        with self._lock:
            rows = {known for _, known in self._places} | {row}
            if len(rows) > self.limit:
                return False
            self._places.add((batch, row))
        action = f"skipped, {len(rows)} of at most {self.limit} rows (data.max_bad_examples)"
        self._news.append({"batch": batch, "row": row, "error": _short(error), "done": action})
        return True

    def record_retry(self, row: int, times: int, error: BaseException) -> None:
        """Records a row that was read by a retry."""
        action = f"read at attempt {times + 1}"
        self._news.append({"row": row, "error": _short(error), "done": action})

    def take_events(self) -> list[dict[str, Any]]:
        """Returns the events since the last call: data, row, error, action, and the batch of a skipped row."""
        if not self._news:
            return []
        events, self._news = self._news, []
        return [{"data": self.what, **event} for event in events]

    def positions(self) -> list[list[int]]:
        """Returns [number of the batch, row] of all skipped rows, for a checkpoint."""
        with self._lock:
            return [list(place) for place in sorted(self._places)]

    def restore(self, places: Sequence[Sequence[int]]) -> None:
        """Replaces the skipped rows by those of a checkpoint."""
        with self._lock:
            self._places = {(int(batch), int(row)) for batch, row in places}


@dataclasses.dataclass(frozen=True)
class ReadPolicy:
    """How examples are read.

    Attributes:
        threads: the number of concurrent readers; with one, reads of all data of this process are serialized.
        retries: the number of retries of a row that raised.
        skipped_rows: records skipped rows; None: no row may be skipped.
    """

    threads: int = 1
    retries: int = 0
    skipped_rows: SkippedRows | None = None
    sleep: Callable[[float], None] = time.sleep

    def read(self, row: int, call: Callable[[], Any]) -> Any:
        """Returns `call()`, which reads `row`, with retries. Raises the exception of the last attempt, also an exit."""
        for attempt in range(self.retries + 1):
            try:
                with _read_lock if self.threads == 1 else contextlib.nullcontext():
                    example = call()
            except SpmdkitError:
                raise
            except Exception as error:
                if attempt == self.retries:
                    raise
                last = error
                self.sleep(min(ROW_RETRY_FIRST_S * 2**attempt, ROW_RETRY_LONGEST_S))
                continue
            if attempt and self.skipped_rows is not None:
                self.skipped_rows.record_retry(row, attempt, last)
            return example
        raise AssertionError("unreachable")


def describe_event(news: Mapping[str, Any], process: int) -> str:
    """Returns a line that describes one event of `SkippedRows.take_events`."""
    batch = f" of batch {news['batch']}" if "batch" in news else ""
    return (
        f"process {process}: {news['data']}[{news['row']}]{batch} could not be read ({news['error']}): {news['done']}"
    )


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


DEFAULT_POLICY = ReadPolicy()
