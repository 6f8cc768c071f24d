"""The examples of each step: a pure function of (number of examples, batch size, seed, step).

Epoch e has an order drawn from (seed, e); step s >= 1 takes its next `batch_size` examples. The schedule does not
depend on the number of processes or devices, so a run resumes at the next step, also on another mesh.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import sys
from collections.abc import Iterable
from typing import NamedTuple, Protocol, Self

import numpy as np

from spmdkit.data.permutation import permute
from spmdkit.errors import ConfigError

# Indices are computed in chunks: otherwise each step would have the fixed cost of about 60 numpy calls.
CHUNK_EXAMPLES = 8192


class BatchSchedule(Protocol):
    """The batches of the steps, of indexed data (`Schedule`) or of a stream (`StreamSchedule`)."""

    @property
    def batch_size(self) -> int: ...

    @property
    def what(self) -> str:
        """Names the data in errors."""

    @property
    def num_examples(self) -> int | None:
        """Number of examples; None if it is unknown."""

    @property
    def always_full(self) -> bool:
        """Whether no batch has a missing row, so that no mask is needed."""

    @property
    def num_batches(self) -> int:
        """Total number of batches of one pass."""

    @property
    def skipped(self) -> tuple[tuple[int, int], ...]:
        """Skipped batches (first, last), sorted and disjoint, numbered as if none were skipped."""

    def with_skipped(self, skipped: tuple[tuple[int, int], ...]) -> Self:
        """Returns the schedule with other skipped batches."""

    def steps_of(self, epochs: int) -> int:
        """Returns the number of steps of the first `epochs` epochs. Raises ConfigError if their length is unknown."""

    def number(self, step: int) -> int:
        """Returns the number of the batch of `step`, which is `step` if none is skipped."""

    def numbers(self, step: int, count: int) -> list[tuple[int, int]]:
        """Returns the batches of `count` steps from `step` on, as ranges (number, number)."""

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns (indices, mask) of a batch; None if the examples have no index."""

    def digest(self, step: int) -> str:
        """Returns a hash over `batch`; "" if the examples have no index: their position has a checksum."""


class ProcessRows(NamedTuple):
    """One process's part of every batch with per-process data (`sk.per_process`).

    Attributes:
        examples: the number of its examples.
        rows: the positions of its rows in the global batch, in the order in which it reads them.
    """

    examples: int
    rows: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Maps a step to its batch. Endless, or one pass over the data with `finite`.

    With `drop_remainder` an epoch has `num_examples // batch_size` full batches and drops the remaining examples.
    Without it, every example is in every epoch and the last batch may be short.

    `skipped`: skipped batches (first, last), sorted and disjoint, numbered as if none were skipped; see `merge_ranges`.
    `shares`: the processes' shares, with per-process data. A batch takes the next rows of each process's order, and an
        epoch ends with the longest. Rows of exhausted processes are missing. `local` is the schedule of one process.
    `epoch_steps`: batches per epoch if other processes have more examples; None: those of this process.

    Raises:
      ConfigError: no examples, a batch size below 1, or `drop_remainder` with fewer examples than one batch.
    """

    num_examples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_remainder: bool = True
    what: str = "train_data"
    finite: bool = False
    skipped: tuple[tuple[int, int], ...] = ()
    shares: tuple[ProcessRows, ...] = ()
    epoch_steps: int | None = None

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise ConfigError(f"{self.what} has {self.num_examples} examples. It needs at least 1.")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}. It must be at least 1.")
        for process in range(len(self.shares)):
            self._alone(process)  # validates it
        if self.drop_remainder and self.num_examples < self.batch_size:
            raise ConfigError(
                f"{self.what} has {self.num_examples} examples, batch_size is {self.batch_size}: not one full batch, "
                "and data.drop_remainder: true uses full batches only. Try a batch_size of at most "
                f"{self.num_examples}, or data.drop_remainder: false."
            )

    def local(self, process: int) -> Schedule:
        """Returns the schedule of one process: the rows of its share, as indices into its data."""
        return dataclasses.replace(self._alone(process), epoch_steps=self.steps_per_epoch, skipped=self.skipped)

    def _alone(self, process: int) -> Schedule:
        share = self.shares[process]
        return dataclasses.replace(
            self,
            num_examples=share.examples,
            batch_size=len(share.rows),
            seed=(self.seed + 1) * 2**32 + process,
            what=f"{self.what} of process {process}",
            skipped=(),
            shares=(),
        )

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in one pass."""
        if self.shares:
            return max(self._alone(process).steps_per_epoch for process in range(len(self.shares)))
        return self._own_steps if self.epoch_steps is None else self.epoch_steps

    @property
    def _own_steps(self) -> int:
        full, remainder = divmod(self.num_examples, self.batch_size)
        return full + (remainder > 0 and not self.drop_remainder)

    @property
    def num_batches(self) -> int:
        """Total number of batches of a finite schedule."""
        assert self.finite, "an endless schedule has no number of batches"
        return self.steps_per_epoch

    @property
    def always_full(self) -> bool:
        """Whether no batch has a missing row, so that no mask is needed."""
        if self.shares:
            return all(self.local(process).always_full for process in range(len(self.shares)))
        if self.steps_per_epoch > self._own_steps:
            return False
        return self.drop_remainder or self.num_examples % self.batch_size == 0

    def epoch(self, step: int) -> int:
        """Returns the epoch (from 0) of the batch of `step`."""
        self._check(step)
        return (self.number(step) - 1) // self.steps_per_epoch

    def passes(self, step: int) -> float:
        """Returns the number of passes over the data after `step`: 1.0 at the last step of the first epoch."""
        return round(self.number(step) / self.steps_per_epoch, 4)

    def steps_of(self, epochs: int) -> int:
        """Returns the number of steps of the first `epochs` epochs."""
        return bisect.bisect_left(range(1, sys.maxsize), epochs, key=self.epoch)

    def with_skipped(self, skipped: tuple[tuple[int, int], ...]) -> Schedule:
        """Returns the schedule with other skipped batches."""
        return dataclasses.replace(self, skipped=skipped)

    def number(self, step: int) -> int:
        """Returns the number of the batch of `step`, which is `step` if none is skipped."""
        return _number(step, self.skipped)

    def numbers(self, step: int, count: int) -> list[tuple[int, int]]:
        """Returns the batches of `count` steps from `step` on, as ranges (number, number)."""
        return [(number, number) for number in map(self.number, range(step, step + count))]

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (indices int64[batch_size], mask bool[batch_size]) of `step` >= 1, both read-only. A missing row has
        mask False, and the index of the last valid row so that it can be loaded."""
        self._check(step)
        if self.shares:
            return self._of_all(step)
        epoch, row = divmod(self.number(step) - 1, self.steps_per_epoch)
        if row >= self._own_steps:  # other processes have more batches
            return np.zeros(self.batch_size, np.int64), _mask(self.batch_size, 0)
        chunk_steps = max(1, CHUNK_EXAMPLES // self.batch_size)
        chunk = _chunk(self, epoch, row // chunk_steps, chunk_steps)
        first = row % chunk_steps * self.batch_size
        indices = chunk[first : first + self.batch_size]
        mask = _mask(self.batch_size, len(indices))
        missing = self.batch_size - len(indices)
        return (np.pad(indices, (0, missing), mode="edge") if missing else indices), mask

    def _of_all(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        indices, mask = np.zeros(self.batch_size, np.int64), np.zeros(self.batch_size, bool)
        for process, share in enumerate(self.shares):
            rows = np.asarray(share.rows)
            indices[rows], mask[rows] = self.local(process).batch(step)
        return indices, mask

    def digest(self, step: int) -> str:
        """Returns 12 hex digits of a hash over the indices, positions and missing rows of the batch of `step`."""
        indices, mask = self.batch(step)
        return hashlib.sha256(indices.astype("<i8").tobytes() + mask.tobytes()).hexdigest()[:12]

    def _check(self, step: int) -> None:
        if step < 1 or (self.finite and step > self.steps_per_epoch):
            raise ValueError(f"step {step} of a schedule with steps 1 to {self.num_batches if self.finite else 'any'}")


@dataclasses.dataclass(frozen=True)
class StreamSchedule:
    """The batches of a stream: they have numbers, and their examples have no index."""

    batch_size: int
    what: str
    always_full: bool
    skipped: tuple[tuple[int, int], ...] = ()
    num_examples: None = None
    num_batches: int = sys.maxsize

    def steps_of(self, epochs: int) -> int:
        """Raises ConfigError: the length of an epoch is unknown."""
        raise ConfigError(
            f"epochs is {epochs}, and {self.what} is a stream, with an unknown number of examples. Set steps. With "
            "data.repeat: false the run also ends when the stream ends."
        )

    def with_skipped(self, skipped: tuple[tuple[int, int], ...]) -> StreamSchedule:
        """Returns the schedule with other skipped batches."""
        return dataclasses.replace(self, skipped=skipped)

    def number(self, step: int) -> int:
        """Returns the number of the batch of `step`."""
        return _number(step, self.skipped)

    def numbers(self, step: int, count: int) -> list[tuple[int, int]]:
        """Returns the batches of `count` steps from `step` on, as ranges (number, number)."""
        return [(number, number) for number in map(self.number, range(step, step + count))]

    def batch(self, step: int) -> None:
        """Returns None."""

    def digest(self, step: int) -> str:
        """Returns ""."""
        return ""


def _number(step: int, skipped: Iterable[tuple[int, int]]) -> int:
    for first, last in skipped:
        if step >= first:
            step += last - first + 1
    return step


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns ranges (first, last) in order, with adjacent ranges merged."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def eval_schedule(
    num_examples: int, batch_size: int, what: str = "eval_data", shares: tuple[ProcessRows, ...] = ()
) -> Schedule:
    """Returns one pass in the data's order. Every example counts exactly once, at any batch size."""
    return Schedule(
        num_examples, batch_size, shuffle=False, drop_remainder=False, what=what, finite=True, shares=shares
    )


@functools.lru_cache(maxsize=8)
def _chunk(schedule: Schedule, epoch: int, chunk: int, chunk_steps: int) -> np.ndarray:
    first = chunk * chunk_steps * schedule.batch_size
    last = min(first + chunk_steps * schedule.batch_size, schedule.num_examples)
    positions = np.arange(first, last, dtype=np.int64)
    indices = permute(positions, schedule.num_examples, schedule.seed, epoch) if schedule.shuffle else positions
    indices.flags.writeable = False  # shared by all callers through the cache
    return indices


@functools.lru_cache(maxsize=64)
def _mask(batch_size: int, num_valid: int) -> np.ndarray:
    mask = np.arange(batch_size) < num_valid
    mask.flags.writeable = False
    return mask
