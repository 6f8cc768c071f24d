"""Writes records for TensorBoard (extra `tensorboard`): `train/loss`, `eval/loss`, `throughput/...`, text, images,
histograms and audio, the config and its hyperparameters.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from spmdkit.metrics.jsonl import LAST_KEYS, plain_number
from spmdkit.metrics.trackers.base import Record, Tracker, names_of
from spmdkit.metrics.trackers.service_run import flat, package, pixels, settings, shown_kinds, tag

KINDS = ("scalars", "text", "image", "histogram", "audio")
NEEDS = {"image": "PIL", "audio": "soundfile"}
"""Kind of record -> the package with which tensorboardX encodes it."""


def open(run: Any, last_step: int) -> Tracker:
    """Returns the tracker of event files in `tensorboard/` of the run directory."""
    files = TensorboardTracker(run.directory / "tensorboard", keep_through_step=last_step)
    if config := settings(run.directory):
        files.write_settings(config, last_step)
    accepts = shown_kinds(KINDS, NEEDS)
    return Tracker(files.write, accepts, flush=files.flush, rewind=files.rewind, close=files.close)


class TensorboardTracker:
    """Writes the values of a record at its step to event files in `directory`.

    `keep_through_step`: the restored step; TensorBoard hides later records of an interrupted run (0: all, None: none).
    Raises ConfigError if tensorboardX is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], keep_through_step: int | None = None) -> None:
        writer = package("tensorboardX", "tensorboard").SummaryWriter

        def open(step: int | None) -> Any:
            # tensorboardX names files by the second and overwrites an existing one.
            suffix = f".{len(list(Path(directory).glob('events.out.*'))):04d}"
            purge_step = None if step is None else step + 1
            return writer(os.fspath(directory), purge_step=purge_step, filename_suffix=suffix)

        self._open = open
        self._writer: Any = self._open(keep_through_step)

    def write_settings(self, config: dict[str, Any], step: int) -> None:
        """Adds the config as text, and its scalars as hyperparameters."""
        text = yaml.safe_dump(config, sort_keys=False)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), step)
        for summary in package("tensorboardX.summary", "tensorboard").hparams(flat(config), {"train/loss": 0.0}):
            self._writer.file_writer.add_summary(summary)

    def write(self, kind: str, record: Record) -> None:
        """Adds a record; the files are written by a thread of tensorboardX."""
        step, writer = int(record["step"]), self._writer
        for key in names_of(record, kind):
            value, name = record[key], tag(record, key)
            if kind == "scalars":
                name = f"throughput/{key}" if key in LAST_KEYS else name
                writer.add_scalar(name, float(plain_number(key, value)), step)
            elif kind == "text":
                writer.add_text(name, value, step)
            elif kind == "histogram":
                writer.add_histogram(name, np.ravel(value), step)
            elif kind == "image":
                writer.add_image(name, pixels(value), step, dataformats="HW" if np.ndim(value) == 2 else "HWC")
            else:
                writer.add_audio(name, np.asarray(value), step, sample_rate=int(record["rate"]))

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
