"""The fingerprint of a data set from its length, the structure of an example, and hashes of a fixed sample of rows.

The sample depends only on the length, so all processes and all starts of a run sample the same rows: up to
`ROWS_IN_MEMORY` rows of arrays, and up to `ROWS_READ` rows of data that are read example by example, as many as can be
read in `FINGERPRINT_S`, in a fixed order. A comparison uses the rows that all processes could read.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from spmdkit.data.open_shards import CheckedStream
from spmdkit.data.permutation import permute
from spmdkit.data.source import Source
from spmdkit.errors import ConfigError, UserCodeError
from spmdkit.foundation import files
from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.timeouts import FINGERPRINT_S
from spmdkit.foundation.trees import describe, named_leaves, tree_bytes

ROWS_IN_MEMORY = 256
BYTES_IN_MEMORY = 2**26
ROWS_READ = 64
MIN_READ = 6
"""Number of rows that are read regardless of time."""
MIN_READ_TWICE, MOST_READ_TWICE = 3, 8
MAX_BLOCKS = 256
"""Maximum number of blocks of a complete comparison."""
READINGS = 3
"""Minimum number of attempts to read a row that raises."""
VARIES = "different each time it is read"
"""Digest of a row that is not a function of its index. Such rows are not compared."""


class Fingerprint(NamedTuple):
    """The fingerprint of a data set.

    Attributes:
        examples: number of examples; of a stream, the text "a stream".
        example: description of one: paths, dtypes, shapes.
        rows: "row 17" -> digest, for the sampled rows that could be read.
        in_memory: whether the data are arrays in memory, so that reading cannot fail.
    """

    examples: int | str
    example: str
    rows: dict[str, str]
    in_memory: bool


def fingerprint(
    source: Source | CheckedStream,
    retries: int = 0,
    clock: Callable[[], float] = time.monotonic,
    *,
    reads_rows: bool = True,
) -> Fingerprint:
    """Returns the fingerprint of a source.

    Args:
        retries: the number of retries of a row in training; the minimum number here.
        reads_rows: whether the sample is read (`data.check`).
    """
    if not reads_rows:
        examples = "a stream" if isinstance(source, CheckedStream) else len(source)
        return Fingerprint(examples, structure(source), {}, in_memory=False)
    if isinstance(source, CheckedStream):
        return Fingerprint("a stream", structure(source), {"first rows": source.first}, in_memory=False)
    readings = max(READINGS, retries + 1)
    sampled = sample(len(source), _most_rows(source))
    if source.in_memory:
        rows = {f"row {row}": _digest(leaves) for row, leaves in _rows(source, sampled)}
        return Fingerprint(len(source), structure(source), rows, in_memory=True)
    deadline = Deadline(FINGERPRINT_S, clock)
    digests, varies = _read_twice(source, _spread(sampled), readings, deadline)
    if varies:
        return Fingerprint(len(source), structure(source), {"rows": VARIES}, in_memory=False)
    for row in _spread(sampled):  # any prefix of this order is spread over all rows
        if len(digests) >= MIN_READ and deadline.expired:
            break
        digests[row] = digests.get(row) or _row(source, row, readings)
    rows = {f"row {row}": digest for row, digest in sorted(digests.items()) if digest is not None}
    return Fingerprint(len(source), structure(source), rows, in_memory=False)


def block_rows(length: int) -> Iterator[range]:
    """Yields the rows of each block of `block_digests`."""
    size = -(-length // MAX_BLOCKS)
    return (range(start, min(start + size, length)) for start in range(0, length, size))


def block_digests(source: Source, retries: int = 0) -> Iterator[str | None]:
    """Reads each row once and yields the digest of each block of consecutive rows; None if one cannot be read."""
    row_bytes = max(1, tree_bytes(source.element()))
    for rows in block_rows(len(source)):
        if source.in_memory:
            most = max(1, BYTES_IN_MEMORY // row_bytes)
            parts: Iterator[str | None] = (
                _digest(jax.tree.leaves(source.gather(np.arange(first, min(first + most, rows.stop)))))
                for first in range(rows.start, rows.stop, most)
            )
        else:
            parts = (_row(source, row, max(READINGS, retries + 1)) for row in rows)
        digests = list(parts)
        yield None if None in digests else files.digest("".join(map(str, digests)).encode())


def rows_vary(source: Source, retries: int = 0) -> bool:
    """Returns whether rows have other contents when they are read again, as with augmentation in `__getitem__`."""
    if source.in_memory:
        return False
    rows = _spread(sample(len(source), _most_rows(source)))
    return _read_twice(source, rows, max(READINGS, retries + 1), Deadline(FINGERPRINT_S, time.monotonic))[1]


def _read_twice(
    source: Source, rows: list[int], readings: int, deadline: Deadline
) -> tuple[dict[int, str | None], bool]:
    """Reads the first `MIN_READ_TWICE` rows, or in time `MOST_READ_TWICE`, twice in a different order. Returns the
    digest of each, None if it cannot be read, and whether any differs."""
    first = dict[int, str | None]()
    for row in rows[:MOST_READ_TWICE]:
        if len(first) >= MIN_READ_TWICE and deadline.expired:
            break
        first[row] = _row(source, row, readings)
    again = {row: _row(source, row, readings) for row in [*first][1:] + [*first][:1]}
    return first, any(again[row] != digest and None not in (again[row], digest) for row, digest in first.items())


def _spread(rows: list[int]) -> list[int]:
    """Returns the rows with the ends first, then the middle, then the midpoints of the rest."""
    step, chosen = len(rows) - 1, dict.fromkeys([rows[0], rows[-1]])
    while step > 1:
        step = (step + 1) // 2
        chosen |= dict.fromkeys(rows[::step])
    return list(chosen | dict.fromkeys(rows))


def structure(source: Source | CheckedStream) -> str:
    """Returns a one-line description of an example: paths, dtypes and shapes."""
    return ", ".join(f"{path}: {describe(leaf)}".removeprefix(": ") for path, leaf in named_leaves(source.element()))


def sample(length: int, most: int) -> list[int]:
    """Returns the rows to sample, ascending: all rows up to `most`, otherwise the ends and rows in between."""
    if length <= most:
        return list(range(length))
    between = permute(np.arange(most - 2, dtype=np.int64), length, 0, 0)
    return sorted({0, length - 1, *map(int, between)})


def _most_rows(source: Source) -> int:
    """Returns the number of rows to sample: for arrays with very large rows, at most `BYTES_IN_MEMORY` in total."""
    if not source.in_memory:
        return ROWS_READ
    return max(ROWS_READ, min(ROWS_IN_MEMORY, BYTES_IN_MEMORY // max(1, tree_bytes(source.element()))))


def _rows(source: Source, rows: list[int]) -> list[tuple[int, list[Any]]]:
    leaves = jax.tree.leaves(source.gather(np.asarray(rows, np.int64)))
    return [(row, [leaf[place] for leaf in leaves]) for place, row in enumerate(rows)]


def _row(source: Source, row: int, readings: int) -> str | None:
    """Returns the digest of one row, or None if it cannot be read; training then reports it by the user's read
    policy."""
    for _ in range(readings):
        with contextlib.suppress(ConfigError, UserCodeError):
            [(_, leaves)] = _rows(source, [row])
            return _digest(leaves)
    return None


def _digest(leaves: list[Any]) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    for leaf in leaves:
        array = np.ascontiguousarray(leaf)
        hashed.update(f"{array.dtype}{array.shape}".encode())
        hashed.update(array.tobytes())
    return hashed.hexdigest()
