"""The batches of the steps as a grain dataset. Apart from stream.py because importing grain costs 0.3 s."""

from __future__ import annotations

from typing import Any

import grain
import numpy as np

from spmdkit.data.schedule import Schedule
from spmdkit.data.source import Source
from spmdkit.errors import ConfigError, UserCodeError


class StepDataset(grain.MapDataset):
    """Item i is `(examples, mask | None)` of step `start + i`: the rows of the global batch at `positions`."""

    def __init__(self, source: Source, schedule: Schedule, positions: np.ndarray | None, start: int, stop: int):
        super().__init__()
        self._source = source
        self._schedule = schedule
        self._positions = positions
        self._start = start
        self._num_steps = stop - start

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, index: Any) -> Any:
        step = self._start + index
        indices, mask = self._schedule.batch(step)
        if self._positions is not None:
            indices, mask = indices[self._positions], mask[self._positions]
        try:
            examples = self._source.gather(indices, self._schedule.epoch(step))
        except (ConfigError, UserCodeError) as error:
            raise type(error)(f"the batch of step {step} could not be read: {error}") from error.__cause__
        return examples, (None if self._schedule.always_full else mask)


def read(dataset: StepDataset, num_threads: int, buffer_size: int) -> Any:
    """Returns grain's iterator over `dataset`, in order; its threads read up to `buffer_size` batches ahead."""
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=buffer_size)
    return iter(dataset.to_iter_dataset(options))
