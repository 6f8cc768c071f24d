"""Writes records for TensorBoard (extra `tensorboard`): `train/loss`, `eval/loss`, `throughput/...`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.metrics.jsonl import LAST_KEYS, plain_number
from spmdkit.metrics.trackers.base import Tracker


def open(run: Any, last_step: int) -> Tracker:
    """Returns the tracker of event files in `tensorboard/` of the run directory."""
    files = TensorboardTracker(run.directory / "tensorboard", keep_through_step=last_step)
    write = lambda kind, record: files.write(record)
    return Tracker(write, flush=files.flush, rewind=files.rewind, close=files.close)


class TensorboardTracker:
    """Writes each number of a record as a scalar at the record's step to event files in `directory`.

    `keep_through_step`: the restored step; TensorBoard hides later records of an interrupted run (0: all, None: none).
    Raises ConfigError if tensorboardX is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], keep_through_step: int | None = None) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "log.trackers names tensorboard, but the package tensorboardX was not found."
                " TensorBoard files are written by it."
                " Run `pip install 'spmdkit[tensorboard]'`, or leave it out of log.trackers."
            ) from error

        def open(step: int | None) -> Any:
            # tensorboardX names files by the second and overwrites an existing one.
            suffix = f".{len(list(Path(directory).glob('events.out.*'))):04d}"
            purge_step = None if step is None else step + 1
            return SummaryWriter(os.fspath(directory), purge_step=purge_step, filename_suffix=suffix)

        self._open = open
        self._writer: Any = self._open(keep_through_step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds the record's numbers; the files are written by a thread of tensorboardX."""
        step = int(record["step"])
        group = str(record.get("split", "train"))
        for key, value in record.items():
            if key not in ("step", "split"):
                tag = f"throughput/{key}" if key in LAST_KEYS else f"{group}/{key}"
                self._writer.add_scalar(tag, float(plain_number(key, value)), step)

    def flush(self) -> None:
        """Passes written records to the operating system."""
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """Makes TensorBoard hide records newer than `step`."""
        self._writer.close()
        self._writer = self._open(step)

    def close(self) -> None:
        """Writes the remaining records. May be called twice."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
