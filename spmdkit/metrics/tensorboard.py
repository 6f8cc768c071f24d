"""The same records for TensorBoard (extra `tensorboard`): `train/loss`, `eval/loss`, `throughput/...`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.metrics.jsonl import LAST_KEYS, plain_number


class TensorboardSink:
    """Writes each number of a record as a scalar at the record's step into event files in `directory`.

    `keep_through_step`: the restored step; TensorBoard is told to hide what an interrupted run wrote after it.
    Raises ConfigError when tensorboardX is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], keep_through_step: int | None = None) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "log.tensorboard is true, but the package tensorboardX was not found."
                " TensorBoard files are written by it."
                " Run `pip install 'spmdkit[tensorboard]'`, or set log.tensorboard: false."
            ) from error
        purge_step = None if not keep_through_step else keep_through_step + 1
        self._writer: Any = SummaryWriter(os.fspath(directory), purge_step=purge_step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds the record's numbers; the files are written by a thread of tensorboardX."""
        step = int(record["step"])
        group = str(record.get("split", "train"))
        for key, value in record.items():
            if key not in ("step", "split"):
                tag = f"throughput/{key}" if key in LAST_KEYS else f"{group}/{key}"
                self._writer.add_scalar(tag, float(plain_number(key, value)), step)

    def close(self) -> None:
        """Writes out what is left. May be called twice."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
