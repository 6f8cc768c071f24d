"""The examples of each step: a pure function of (number of examples, batch size, seed, step).

Epoch e has an order drawn from (seed, e); step s >= 1 takes its next `batch_size` examples. The schedule does not
depend on the number of processes or devices, so a run resumes at the next step, also on another mesh.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
import sys
from collections.abc import Iterable
from typing import NamedTuple, Protocol, Self

import numpy as np

from spmdkit.data.batch_sizes import BatchSizes, continued, size_of
from spmdkit.data.permutation import permute
from spmdkit.errors import ConfigError

# Indices are computed in chunks: otherwise each step would have the fixed cost of about 60 numpy calls.
CHUNK_EXAMPLES = 8192


class BatchSchedule(Protocol):
    """The batches of the steps, of indexed data (`Schedule`) or of a stream (`StreamSchedule`)."""

    @property
    def batch_size(self) -> int: ...

    @property
    def sizes(self) -> BatchSizes:
        """The batch sizes, if there are several; `batch_size` is then the largest."""

    def with_sizes(self, sizes: BatchSizes) -> Self:
        """Returns the schedule with other batch sizes."""

    def size(self, number: int) -> int:
        """Returns the size of a batch, with missing rows."""

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


@dataclasses.dataclass(frozen=True, eq=False)
class Bucket:
    """The examples with a length of at most `length`, and more than that of the bucket before."""

    length: int
    examples: np.ndarray


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Maps a step to its batch. Endless, or one pass over the data with `finite`.

    With `drop_remainder` an epoch has `num_examples // batch_size` full batches and drops the remaining examples.
    Without it, every example is in every epoch and the last batch may be short.

    `sizes`: batch sizes, if there are several; `batch_size` is the largest. A batch has the next examples.
    `buckets`: each batch has examples of one bucket; the order of the batches of all buckets is drawn.
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
    sizes: BatchSizes = ()
    buckets: tuple[Bucket, ...] = ()

    def __post_init__(self) -> None:
        if self.buckets and (self.sizes or self.shares):
            raise ConfigError(
                "data.bucket_boundaries needs one batch_size, and train_data that all processes share, found "
                f"{'several sizes' if self.sizes else 'sk.per_process'}. Remove bucket_boundaries and bucket_by."
            )
        for i, bucket in enumerate(self.buckets):
            if len(bucket.examples):
                self._of_bucket(i)  # validates it
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
        if self.buckets:
            return sum(map(self._num_in_bucket, range(len(self.buckets))))
        if self.shares:
            return max(self._alone(process).steps_per_epoch for process in range(len(self.shares)))
        return self._own_steps if self.epoch_steps is None else self.epoch_steps

    @property
    def _own_steps(self) -> int:
        return self._num_batches(self.num_examples, self.batch_size)

    def _num_batches(self, num_examples: int, size: int) -> int:
        full, remainder = divmod(num_examples, size)
        return full + (remainder > 0 and not self.drop_remainder)

    def size(self, number: int) -> int:
        """Returns the size of a batch, with missing rows."""
        return size_of(self.sizes, number) if self.sizes else self.batch_size

    def with_sizes(self, sizes: BatchSizes) -> Schedule:
        """Returns the schedule with other batch sizes."""
        return dataclasses.replace(self, sizes=sizes)

    def _place(self, number: int) -> tuple[int, int]:
        """Returns (epoch, its examples before the batch) of a batch."""
        if not self.sizes:
            epoch, row = divmod(number - 1, self.steps_per_epoch)
            return epoch, row * self.batch_size
        epoch, first = 0, 0
        for (start, size), (stop, _) in itertools.pairwise([*self.sizes, (sys.maxsize, 0)]):
            if (count := min(number - 1, stop) - start) <= 0:
                break
            if count > (left := self._num_batches(self.num_examples - first, size)):
                full, rest = divmod(count - left - 1, self._num_batches(self.num_examples, size))
                epoch, first, count = epoch + 1 + full, 0, rest + 1
            first = min(first + count * size, self.num_examples)
        return (epoch, first) if self._num_batches(self.num_examples - first, self.size(number)) else (epoch + 1, 0)

    @property
    def num_batches(self) -> int:
        """Total number of batches of a finite schedule."""
        assert self.finite, "an endless schedule has no number of batches"
        return self.steps_per_epoch

    @property
    def always_full(self) -> bool:
        """Whether no batch has a missing row, so that no mask is needed."""
        if self.buckets:
            return self.drop_remainder or not any(len(x.examples) % self.batch_size for x in self.buckets)
        if self.shares:
            return all(self.local(process).always_full for process in range(len(self.shares)))
        if self.steps_per_epoch > self._own_steps:
            return False
        return self.drop_remainder or (len(self.sizes) < 2 and self.num_examples % self.batch_size == 0)

    def epoch(self, step: int) -> int:
        """Returns the epoch (from 0) of the batch of `step`."""
        self._check(step)
        return self._place(self.number(step))[0]

    def passes(self, step: int) -> float:
        """Returns the number of passes over the data after `step`: 1.0 at the last step of the first epoch."""
        number = self.number(step)
        if not self.sizes:
            return round(number / self.steps_per_epoch, 4)
        (epoch, first), (after, _) = self._place(number), self._place(number + 1)
        return float(after) if after > epoch else round(epoch + (first + self.size(number)) / self.num_examples, 4)

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
        """Returns (indices int64[size], mask bool[size]) of `step` >= 1, both read-only. A missing row has
        mask False, and the index of the last valid row so that it can be loaded."""
        self._check(step)
        if self.shares:
            return self._of_all(step)
        if self.buckets:
            i, step = self._in_bucket(self.number(step))
            indices, mask = self._of_bucket(i).batch(step)
            return self.buckets[i].examples[indices], mask
        number = self.number(step)
        (epoch, first), size = self._place(number), self.size(number)
        if not self._num_batches(max(0, self.num_examples - first), size):  # other processes have more batches
            return np.zeros(size, np.int64), _mask(size, 0)
        before = first // size % max(1, CHUNK_EXAMPLES // size) * size
        indices = _chunk(self, epoch, first - before, size)[before : before + size]
        mask = _mask(size, len(indices))
        missing = size - len(indices)
        return (np.pad(indices, (0, missing), mode="edge") if missing else indices), mask

    def _of_all(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        indices, mask = np.zeros(self.batch_size, np.int64), np.zeros(self.batch_size, bool)
        for process, share in enumerate(self.shares):
            rows = np.asarray(share.rows)
            indices[rows], mask[rows] = self.local(process).batch(step)
        return indices, mask

    def _in_bucket(self, number: int) -> tuple[int, int]:
        """Returns (the bucket of a batch, its step in the schedule of this bucket)."""
        epoch, place = divmod(number - 1, self.steps_per_epoch)
        buckets, counts = _bucket_order(self, epoch)
        i = int(buckets[place])
        return i, epoch * self._num_in_bucket(i) + int(counts[place]) + 1

    def _num_in_bucket(self, i: int) -> int:
        return self._num_batches(len(self.buckets[i].examples), self.batch_size)

    def _of_bucket(self, i: int) -> Schedule:
        examples, what = len(self.buckets[i].examples), f"{self.what} up to length {self.buckets[i].length}"
        seed = (self.seed + 1) * 2**32 + i
        return Schedule(examples, self.batch_size, seed, self.shuffle, self.drop_remainder, what)

    def length(self, number: int) -> int:
        """Returns the length of the bucket of a batch."""
        return self.buckets[self._in_bucket(number)[0]].length

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
    sizes: BatchSizes = ()

    def size(self, number: int) -> int:
        """Returns the size of a batch, with missing rows."""
        return size_of(self.sizes, number) if self.sizes else self.batch_size

    def with_sizes(self, sizes: BatchSizes) -> StreamSchedule:
        """Returns the schedule with other batch sizes."""
        return dataclasses.replace(self, sizes=sizes)

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


def continue_sizes(schedule: BatchSchedule, before: BatchSizes, done: int, after: BatchSizes) -> BatchSchedule:
    """Returns the schedule with the batch sizes `before` for the first `done` batches, and `after` from then on.

    Raises:
        ConfigError: batches are short that are always full with the sizes `after` alone.
    """
    sizes = continued(before, done, after)
    new = schedule.with_sizes(sizes if len(sizes) > 1 else ())
    if new.always_full != schedule.always_full:
        raise ConfigError(
            f"batch_size changes after {done} batches, within an epoch of {schedule.num_examples} examples, and with "
            "data.drop_remainder: false its last batch is short. Name the sizes of the whole run: batch_size: "
            f"{dict(sizes)}."
        )
    return new


@functools.lru_cache(maxsize=32)
def _chunk(schedule: Schedule, epoch: int, first: int, size: int) -> np.ndarray:
    """Returns the examples from place `first` of an epoch on, for some batches."""
    last = min(first + max(1, CHUNK_EXAMPLES // size) * size, schedule.num_examples)
    positions = np.arange(first, last, dtype=np.int64)
    indices = permute(positions, schedule.num_examples, schedule.seed, epoch) if schedule.shuffle else positions
    indices.flags.writeable = False  # shared by all callers through the cache
    return indices


@functools.lru_cache(maxsize=2)
def _bucket_order(schedule: Schedule, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the bucket of each batch of an epoch, the number of batches of this bucket before it in the epoch)."""
    each = [schedule._num_in_bucket(i) for i in range(len(schedule.buckets))]
    buckets, places = np.repeat(np.arange(len(each)), each), np.arange(sum(each), dtype=np.int64)
    if schedule.shuffle:
        buckets = buckets[permute(places, len(places), (schedule.seed + 1) * 2**32 - 1, epoch)]
    counts = np.empty(len(places), np.int64)
    for i, num in enumerate(each):
        counts[buckets == i] = np.arange(num)
    return buckets, counts


@functools.lru_cache(maxsize=64)
def _mask(batch_size: int, num_valid: int) -> np.ndarray:
    mask = np.arange(batch_size) < num_valid
    mask.flags.writeable = False
    return mask
