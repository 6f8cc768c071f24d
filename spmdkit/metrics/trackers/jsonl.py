"""`metrics.jsonl`: the run's own record, one line for each (arrays in `counts.jsonl`, likewise), cut back to the
restored step on resume.

Each record is one `write` to the file, so a killed process loses nothing that was written. `sync` waits for the disk:
it is called before a checkpoint is saved, so that no checkpoint is newer than its metrics even when the power fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spmdkit.foundation.files import FILE_MODE, json_object, not_writable, not_written, replace
from spmdkit.metrics.jsonl import record_line
from spmdkit.metrics.trackers.base import Tracker


def open(run: Any, last_step: int) -> Tracker:
    """Returns the tracker of `metrics.jsonl` in the run's directory, and of `counts.jsonl` where a metric is an
    array."""
    path = run.directory / "counts.jsonl"
    file, arrays = JsonlTracker(run.directory / "metrics.jsonl", last_step), list[JsonlTracker]()

    def of_arrays() -> JsonlTracker:
        if not arrays:
            arrays.append(JsonlTracker(path, last_step, arrays=True))
        return arrays[0]

    if path.exists():
        of_arrays()

    def each(use: Callable[[JsonlTracker], None]) -> None:
        for tracker in (file, *arrays):
            use(tracker)

    return Tracker(
        lambda kind, record: (file if kind == "scalars" else of_arrays()).write(record),
        accepts=frozenset({"scalars", "histogram"}),
        flush=lambda: each(JsonlTracker.sync),
        rewind=lambda step: each(lambda tracker: tracker.rewind(step)),
        close=lambda: each(JsonlTracker.close),
        own=True,
    )


class JsonlTracker:
    """Appends records to `path`, after cutting back what an interrupted run wrote past its last checkpoint.

    `keep_through_step`: the restored step (0: a new run). Lines of later steps and lines that are no record
    (torn by a kill, garbage) are dropped; the other lines keep their order and their bytes. None keeps all steps.
    `.dropped_steps` and `.dropped_damaged` count what went away. The file is replaced in one rename, so a kill at any
    moment leaves the old file or the new one.

    Key order of a line: step, split, loss, the others sorted, examples_per_s, step_time_s, input_wait_s.

    Raises ConfigError when the file cannot be opened (folder not writable), CheckpointWriteError when a line does not
    fit any more (disk full); the line is taken back, so the file stays whole. Raises UserCodeError for a metric that is
    not one number; with `arrays` lists of them are taken too.
    """

    def __init__(self, path: str | os.PathLike[str], keep_through_step: int | None, arrays: bool = False) -> None:
        self.path, self._arrays = Path(path), arrays
        self.dropped_steps = 0
        self.dropped_damaged = 0
        try:
            if self.path.exists():
                self._cut_back(keep_through_step)
            self._descriptor: int | None = self._open()
        except OSError as error:
            raise not_writable(self.path, error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one line and hands it to the operating system before it returns."""
        assert self._descriptor is not None, "write after close"
        line = record_line(record, self._arrays).encode()
        size_before = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):  # a disk that fills up takes part of a line, and refuses the rest
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, size_before)
            raise not_written(self.path, error) from error

    def sync(self) -> None:
        """Waits until every line so far is on the disk. A few ms on a local disk: once per checkpoint, not per line."""
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
        """Drops the lines of steps after `step`: training goes on from there again."""
        assert self._descriptor is not None, "rewind after close"
        try:
            self._cut_back(step)
            os.close(self._descriptor)  # of the file that was replaced
            self._descriptor = self._open()
        except OSError as error:
            raise not_written(self.path, error) from error

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)

    def _cut_back(self, keep_through_step: int | None) -> None:
        content = self.path.read_bytes()
        kept = []
        for line in content.split(b"\n"):
            if not line.strip():
                continue
            record = json_object(line)
            step = record.get("step") if record is not None else None
            if not isinstance(step, int) or isinstance(step, bool):
                self.dropped_damaged += 1
            elif keep_through_step is not None and step > keep_through_step:
                self.dropped_steps += 1
            else:
                kept.append(line + b"\n")
        if b"".join(kept) != content:
            replace(self.path, b"".join(kept))
