"""`sk.per_process(source)`: different data on each process, such as the files of its local disk.

The schedule is computed from all lengths (`Schedule.shares`): no row is read twice in an epoch, and processes with
fewer rows are padded. Such a run resumes only with the same number of processes and the same lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdkit.data.schedule import ProcessRows
from spmdkit.errors import ConfigError


@dataclass(frozen=True)
class PerProcess:
    """A source that only this process reads.

    Attributes:
        source: the data, as in `Task(train_data=)`.
        lengths: numbers of examples of all processes, in process order, set once the processes have exchanged them.
            Empty for one process.
    """

    source: Any
    lengths: tuple[int, ...] = ()


def per_process(source: Any) -> PerProcess:
    """Returns data for a `Task` that differ between processes. Every process reads all of its `source` in each
    epoch."""
    return PerProcess(source)


def shares(given: PerProcess, rows: Sequence[np.ndarray], what: str) -> tuple[ProcessRows, ...]:
    """Returns the shares of a schedule of several processes.

    Args:
        given: the task's data; `what` names it in messages.
        rows: the positions of each process's rows in the global batch.

    Raises:
        ConfigError: processes hold the same rows, or have not exchanged their numbers of examples.
    """
    positions = np.concatenate(rows)
    if len(positions) != len(np.unique(positions)):
        raise ConfigError(
            f"{what} is sk.per_process, and several of the {len(rows)} processes hold the same rows of a batch: the "
            "mesh shards something else than the batch between them. Per-process data need rows that only one "
            "process holds. Set mesh.replica, data or fsdp to a multiple of the number of processes, or use the same "
            "data on all processes."
        )
    if len(given.lengths) != len(rows):
        raise ConfigError(
            f"{what} is sk.per_process, and the {len(rows)} processes have not exchanged their numbers of examples. "
            "sk.train does that. Use it, or use the same data on all processes."
        )
    return tuple(ProcessRows(length, tuple(map(int, part))) for length, part in zip(given.lengths, rows, strict=True))
