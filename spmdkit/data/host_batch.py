"""The rows of one step, read synchronously: no thread, no prefetch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from spmdkit.data.schedule import Schedule
from spmdkit.data.source import Source
from spmdkit.errors import ConfigError, UserCodeError


class HostBatch(NamedTuple):
    """The rows of one step on this process: a pytree of numpy arrays; mask is bool[rows], None if batches are always
    full."""

    examples: Any
    mask: np.ndarray | None


def read_step(
    source: Source, schedule: Schedule, positions: np.ndarray | None, step: int
) -> tuple[Any, np.ndarray | None]:
    """Returns `(examples, mask | None)` of `step`: the rows of the global batch at `positions`.

    If batches can be short, a skipped row is padding.
    """
    indices, mask = schedule.batch(step)
    if positions is not None:
        indices, mask = indices[positions], mask[positions]
    try:
        examples = source.gather(indices, schedule.epoch(step), schedule.number(step))
    except (ConfigError, UserCodeError) as error:
        raise type(error)(f"the batch of step {step} could not be read: {error}") from error.__cause__
    if schedule.always_full:
        return examples, None
    left_out = source.skipped(indices, schedule.number(step))
    return examples, mask if left_out is None else mask & ~left_out
