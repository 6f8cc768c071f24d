"""How a user's examples are read: one at a time unless asked otherwise, again where that may help, and which rows are
left out.

A row that cannot be read, also not again, may be left out. Where batches can be short (`drop_remainder: false`, and rows that
do not fill them), its place is padding; otherwise the next row that can be read takes it, and counts twice in that
batch. Which rows those were is a ledger of (number of the batch, row). What a checkpoint holds of it makes a restart
leave out the same rows at the same places, also where a row that failed once could be read by now.
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
"""Of all data of this process: training and evaluation may share a file, and so a position in it."""


class SkippedRows:
    """Rows that are left out of batches, and what was tried again. For the threads of one process.

    Args:
        limit: how many rows may be left out.
        what: names the data in messages.
    """

    def __init__(self, limit: int = 0, what: str = "train_data"):
        self.limit, self.what = limit, what
        self._lock = threading.Lock()
        self._places: set[tuple[int, int]] = set()
        self._news: list[dict[str, Any]] = []

    @property
    def rows(self) -> list[int]:
        """The rows that are left out, each once."""
        return sorted({row for _, row in self._places})

    def has(self, batch: int, row: int) -> bool:
        """Returns whether `row` is left out of batch number `batch`."""
        return (batch, row) in self._places

    def skip(self, batch: int, row: int, error: BaseException) -> bool:
        """Returns whether `row` is left out now: not where that would be one row more than the limit."""
        with self._lock:
            rows = {known for _, known in self._places} | {row}
            if len(rows) > self.limit:
                return False
            self._places.add((batch, row))
        said = f"left out, {len(rows)} of at most {self.limit} rows (data.max_bad_examples)"
        self._news.append({"batch": batch, "row": row, "error": _short(error), "done": said})
        return True

    def record_retry(self, row: int, times: int, error: BaseException) -> None:
        """Takes note of a row that could be read after all."""
        said = f"read at attempt {times + 1}"
        self._news.append({"row": row, "error": _short(error), "done": said})

    def take_events(self) -> list[dict[str, Any]]:
        """Returns what has happened since the last call: data, row, error, what was done, and of a row left out its
        batch."""
        if not self._news:
            return []
        told, self._news = self._news, []
        return [{"data": self.what, **each} for each in told]

    def positions(self) -> list[list[int]]:
        """Returns [number of the batch, row] of all that is left out, for a checkpoint."""
        with self._lock:
            return [list(place) for place in sorted(self._places)]

    def restore(self, places: Sequence[Sequence[int]]) -> None:
        """Leaves out what a checkpoint says, and nothing else."""
        with self._lock:
            self._places = {(int(batch), int(row)) for batch, row in places}


@dataclasses.dataclass(frozen=True)
class ReadPolicy:
    """How examples are read.

    Attributes:
        threads: how many may read at once; with one, nothing else reads data of this process meanwhile.
        retries: how often a row that raised is read again.
        skipped_rows: rows that may be left out; None: none.
    """

    threads: int = 1
    retries: int = 0
    skipped_rows: SkippedRows | None = None
    sleep: Callable[[float], None] = time.sleep

    def read(self, row: int, call: Callable[[], Any]) -> Any:
        """Returns `call()`, which reads `row`. What it raises at the last attempt is raised, also an exit."""
        for attempt in range(self.retries + 1):
            try:
                with _read_lock if self.threads == 1 else contextlib.nullcontext():
                    found = call()
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
            return found
        raise AssertionError("unreachable")


def describe_event(news: Mapping[str, Any], process: int) -> str:
    """Returns a line about one piece of `Ledger.news`."""
    batch = f" of batch {news['batch']}" if "batch" in news else ""
    return (
        f"process {process}: {news['data']}[{news['row']}]{batch} could not be read ({news['error']}): {news['done']}"
    )


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


DEFAULT_POLICY = ReadPolicy()
