"""`events.jsonl`: the events of a run, with time and process: started, restored, saved, fault, stopped.

Events are a history: unlike metrics they are never truncated, so an interruption stays visible after the resume.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spmdkit.foundation import redact
from spmdkit.foundation.files import not_writable, open_append, strict_json


class EventLog:
    """Appends `{"event", "time", "process", ...}` lines to `path`, which all processes of a run share.

    `time` is wall time in UTC, ISO 8601 with milliseconds (`2025-01-31T12:00:00.000Z`), from `clock` (seconds since the
    epoch). A line is one appending write, so lines of processes on one machine do not mix.

    `is_owner`: whether the run still owns its directory; if not, nothing is written.

    Raises ConfigError if the file cannot be opened. A line that cannot be appended later (disk full) is printed to
    standard error: events are written during other failures, and must not hide them or their exit code.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        process: int = 0,
        clock: Callable[[], float] = time.time,
        is_owner: Callable[[], bool] = lambda: True,
    ) -> None:
        self.path, self._is_ours = Path(path), is_owner
        self.process = process
        self._clock = clock
        try:
            self._descriptor: int | None = open_append(self.path)
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":  # torn by a kill: separates it from new lines
                os.write(self._descriptor, b"\n")
        except OSError as error:
            raise not_writable(self.path, error) from error

    def write(self, event: str, /, **fields: Any) -> None:
        """Appends one event; `fields` are JSON values, such as `step=120`."""
        assert not {"event", "time", "process"} & set(fields), f"reserved names in {sorted(fields)}"
        head = {"event": event, "time": utc_time(self._clock()), "process": self.process}
        line = json.dumps(strict_json({**head, **redact.redact_value(fields)}), allow_nan=False, default=str) + "\n"
        if self._descriptor is None:  # closed: report the late failure anyway
            sys.stderr.write(f"event after the log was closed: {line}")
            return
        if not self._is_ours():
            return
        try:
            os.write(self._descriptor, line.encode())
        except OSError as error:
            sys.stderr.write(f"{self.path} cannot be written ({error.strerror}): {line}")

    def close(self) -> None:
        """Closes the file. May be called twice."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


def utc_time(seconds: float) -> str:
    """Returns seconds since the epoch as `2025-01-31T12:00:00.000Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(text: Any) -> float | None:
    """Returns the seconds since the epoch of an ISO 8601 time with a zone; None if `text` is not such a time."""
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return moment.timestamp() if moment.tzinfo is not None else None
