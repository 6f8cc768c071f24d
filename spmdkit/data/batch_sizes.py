"""The schedule of a batch size: (number of batches before it, size), ascending from 0."""

from __future__ import annotations

import bisect

BatchSizes = tuple[tuple[int, int], ...]


def size_of(sizes: BatchSizes, number: int) -> int:
    """Returns the size of batch `number` (from 1 on)."""
    return sizes[bisect.bisect_left(sizes, number, key=lambda part: part[0]) - 1][1]


def continued(before: BatchSizes, done: int, after: BatchSizes) -> BatchSizes:
    """Returns the schedule of `before` for the first `done` batches, and of `after` from then on."""
    parts = [*((start, size) for start, size in before if start < done), (done, size_of(after, done + 1))]
    parts += [(start, size) for start, size in after if start > done]
    return tuple(part for i, part in enumerate(parts) if i == 0 or part[1] != parts[i - 1][1])
