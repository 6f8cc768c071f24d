"""`sk.per_process(source)`: data that are other ones on each process, such as the files of its own disk.

Their structure is compared, their lengths are added up, and the schedule is made from the lengths of all
(`Schedule.shares`): no row is read twice in an epoch, and a process that has fewer rows than others is padded. The
order of rows depends on which process has them, so such a run goes on with as many processes and the same lengths.
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
    """A source of this process alone.

    Attributes:
        source: what `Task(train_data=)` takes otherwise.
        lengths: examples of all processes, in their order; known once they have met. Empty where there is one process.
    """

    source: Any
    lengths: tuple[int, ...] = ()


def per_process(source: Any) -> PerProcess:
    """Returns data for a `Task` of which each process has others: every process reads `source`, its own, whole in each
    epoch."""
    return PerProcess(source)


def shares(given: PerProcess, rows: Sequence[np.ndarray], what: str) -> tuple[ProcessRows, ...]:
    """Returns the shares of a schedule of several processes.

    Args:
        given: what the task gives as `what`.
        rows: for each process the positions of its rows in the global batch.

    Raises:
        ConfigError: processes hold the same rows, or have not told each other how many examples they have.
    """
    held = np.concatenate(rows)
    if len(held) != len(np.unique(held)):
        raise ConfigError(
            f"{what} is sk.per_process, and several of the {len(rows)} processes hold the same rows of a batch: the "
            "mesh cuts something else than the batch between them. Data of one process can only be rows that it "
            "alone holds. Set mesh.replica, data or fsdp to a multiple of the number of processes, or give all "
            "processes the same data."
        )
    if len(given.lengths) != len(rows):
        raise ConfigError(
            f"{what} is sk.per_process, and the {len(rows)} processes have not told each other how many examples they "
            "have. sk.train does that. Use it, or give all processes the same data."
        )
    return tuple(ProcessRows(length, tuple(map(int, own))) for length, own in zip(given.lengths, rows, strict=True))
