"""`metrics.jsonl`: the run's primary metrics, one line per record (arrays likewise in `counts.jsonl`, text in
`text.jsonl`), truncated to the restored step on resume.

Each record is one `write` to the file, so a killed process loses no written record. `sync` waits for the disk. It is
called before a checkpoint is saved, so that no checkpoint is newer than its metrics even after a power failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spmdkit.foundation.files import json_object, not_writable, not_written, open_append, read_regular, replace
from spmdkit.metrics.jsonl import record_line
from spmdkit.metrics.trackers.base import Tracker

FILES = {"array": "counts.jsonl", "text": "text.jsonl"}
"""Kind of record -> its file, which exists if there are such records."""


def open(run: Any, last_step: int) -> Tracker:
    """Returns the tracker of `metrics.jsonl` in the run directory, and of `FILES`."""
    opened = {"scalars": JsonlTracker(run.directory / "metrics.jsonl", last_step)}

    def of_kind(kind: str) -> JsonlTracker:
        if kind not in opened:
            opened[kind] = JsonlTracker(run.directory / FILES[kind], last_step, arrays=True)
        return opened[kind]

    for kind, name in FILES.items():
        if (run.directory / name).exists():
            of_kind(kind)

    def each(use: Callable[[JsonlTracker], None]) -> None:
        for tracker in opened.values():
            use(tracker)

    return Tracker(
        lambda kind, record: of_kind(kind).write(record),
        accepts=frozenset({"scalars", *FILES}),
        flush=lambda: each(JsonlTracker.sync),
        rewind=lambda step: each(lambda tracker: tracker.rewind(step)),
        close=lambda: each(JsonlTracker.close),
        own=True,
    )


class JsonlTracker:
    """Appends records to `path`, after removing those that an interrupted run wrote after its last checkpoint.

    `keep_through_step`: the restored step (0: a new run; None: retains all steps). Lines of later steps and invalid
    lines (torn by a kill, garbage) are dropped; the other lines keep their order and bytes. The file is replaced by a
    rename, so a kill leaves the old or the new file.

    Key order of a line: step, split, epoch, loss, the others sorted, examples_per_s, step_time_s, input_wait_s.

    Raises ConfigError if the file cannot be opened (folder not writable), and CheckpointWriteError if a line cannot be
    written (disk full); the partial line is removed, so the file stays valid. Raises UserCodeError for a metric that is
    not one number; with `arrays`, lists of numbers and text are also accepted.
    """

    def __init__(self, path: str | os.PathLike[str], keep_through_step: int | None, arrays: bool = False) -> None:
        self.path, self._arrays = Path(path), arrays
        try:
            if self.path.exists():
                self._truncate(keep_through_step)
            self._descriptor: int | None = self._open()
        except OSError as error:
            raise not_writable(self.path, error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one line and passes it to the operating system before it returns."""
        assert self._descriptor is not None, "write after close"
        line = record_line(record, self._arrays).encode()
        size_before = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):  # a full disk accepts part of a line and rejects the rest
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, size_before)
            raise not_written(self.path, error) from error

    def sync(self) -> None:
        """Waits until all lines are on disk: a few ms on a local disk, so once per checkpoint and not per line."""
        assert self._descriptor is not None, "sync after close"
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise not_written(self.path, error) from error

    def close(self) -> None:
        """Syncs and closes the file. May be called twice."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.fsync(descriptor)
            except OSError as error:
                raise not_written(self.path, error) from error
            finally:
                os.close(descriptor)

    def rewind(self, step: int) -> None:
        """Drops the lines of steps after `step`: training continues from there."""
        assert self._descriptor is not None, "rewind after close"
        try:
            self._truncate(step)
            os.close(self._descriptor)  # the descriptor of the replaced file
            self._descriptor = self._open()
        except OSError as error:
            raise not_written(self.path, error) from error

    def _open(self) -> int:
        return open_append(self.path)

    def _truncate(self, keep_through_step: int | None) -> None:
        content = read_regular(self.path)
        lines = []
        for line in content.split(b"\n"):
            if not line.strip():
                continue
            record = json_object(line)
            step = record.get("step") if record is not None else None
            if not isinstance(step, int) or isinstance(step, bool):
                continue
            if keep_through_step is None or step <= keep_through_step:
                lines.append(line + b"\n")
        if b"".join(lines) != content:
            replace(self.path, b"".join(lines))
