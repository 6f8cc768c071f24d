"""`Reporter`: the output of a run during training, to its trackers and to the terminal of process 0."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from spmdkit import metrics
from spmdkit.cluster import Cluster
from spmdkit.config import Config, to_yaml
from spmdkit.errors import ConfigError
from spmdkit.foundation import files, phase, redact
from spmdkit.foundation.formatting import nearest
from spmdkit.metrics import trackers
from spmdkit.metrics.trackers.base import KINDS
from spmdkit.run.hooks.base import RunView

KEYS = ("step", "split")


class Reporter:
    """Trackers, progress display and throughput of a run, from `open` on. `environment`: that of environment.json."""

    progress: metrics.Progress
    throughput: metrics.Throughput

    def __init__(self, config: Config, cluster: Cluster, clock: Callable[[], float]):
        self._config, self._is_main, self._clock = config, cluster.is_main, clock
        # On every process, so that an error does not end only one of them.
        self._chosen = trackers.chosen(config.log.trackers, config.folder)
        self.trackers = trackers.Trackers(self.message)
        self.environment = metrics.environment(
            folder=config.folder, devices=cluster.devices, num_processes=cluster.num_processes
        )

    def open(self, run: RunView, step: int, stack: ExitStack) -> None:
        """Opens the records of `run` after `step`; `stack` closes them."""
        config = self._config
        mode = config.log.progress if self._is_main else "off"
        unit, columns = run.program.task.unit, config.log.columns
        self.progress = metrics.Progress(config.num_steps, step + 1, mode, examples_unit=unit, columns=columns)
        stack.callback(self.progress.close)
        self.throughput = metrics.Throughput(config.largest_batch, self._clock)
        if not self._is_main:
            return
        text = to_yaml(config, absolute_paths=True, hide_secrets=True, keep_references=True)
        files.write_text(run.directory / "config.yaml", text)
        files.write_json(run.directory / "environment.json", self.environment)
        stack.callback(self.trackers.close)
        for tracker in self._chosen:
            self.trackers.add(tracker.name, functools.partial(tracker.open, run, step))

    def message(self, text: str) -> None:
        """Shows a line on the terminal of process 0."""
        with phase.during("printing"):  # a paused reader (pager, Ctrl-S) is not a hang
            self.progress.message(redact.redact_text(text))

    def write(self, record: Mapping[str, Any], kind: str) -> None:
        """Writes a record `{"step", ...}` on process 0, also of numpy and jax arrays. Arrays among scalars form a
        separate record of the kind `array`.

        Raises:
            ConfigError: there is no such kind.
        """
        if kind not in KINDS:
            raise ConfigError(f"run.write: kind is {kind!r}.{nearest(kind, KINDS)} It is one of {', '.join(KINDS)}.")
        if kind != "scalars":
            as_array: Callable[[Any], Any] = lambda x: np.asarray(x).tolist() if kind == "array" else np.asarray(x)
            plain = {name: as_array(x) if kind != "text" else str(x) for name, x in record.items() if name not in KEYS}
            self.trackers.write({name: record[name] for name in KEYS if name in record} | plain, kind)
            return
        arrays = {name: np.asarray(x).tolist() for name, x in record.items() if not isinstance(x, str) and np.ndim(x)}
        scalars = {name: x for name, x in record.items() if name not in arrays}  # a copy, for the thread
        self.trackers.write(scalars)
        with phase.during("printing"):
            self.progress.write(scalars)
        if arrays:
            which = {name: record[name] for name in KEYS if name in record}
            self.trackers.write(which | arrays, "array")

    def close(self) -> None:
        """Closes trackers and progress on process 0, so that all records are written."""
        if self._is_main:
            self.trackers.close()
            self.progress.close()
