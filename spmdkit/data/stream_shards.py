"""Which shard of a stream supplies which row of a batch: arithmetic on the batch, the same on every mesh.

    place(position)   position % J * M + position // J         M microbatches of J rows
    shard             place * num_shards // batch_size

`place` is the order of a mesh with one row per device. Devices hold contiguous places on every mesh, so each shard
supplies a contiguous block, and processes read different shards. The set of examples of a step does not depend on M.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spmdkit.errors import ConfigError

DEFAULT_SHARDS = 16


def places(positions: np.ndarray, batch_size: int, microbatches: int) -> np.ndarray:
    """Returns the places of positions of the global batch."""
    rows = batch_size // microbatches
    of_positions: np.ndarray = positions % rows * microbatches + positions // rows
    return of_positions


def shards_of(of_places: np.ndarray, num_shards: int, batch_size: int) -> np.ndarray:
    """Returns the shard of each place."""
    return of_places * num_shards // batch_size


def choose_shards(configured: int | None, most: int | None, parts: Mapping[int, Sequence[np.ndarray]]) -> int:
    """Returns the number of shards of a new run: `configured`, or the largest suitable number up to `DEFAULT_SHARDS` or
    the number of processes.

    Args:
        most: the largest number of shards of the stream; None: any.
        parts: batch size -> the places that each process holds.
    """
    if configured is not None:
        return configured
    least = min(parts)
    top = min(max(DEFAULT_SHARDS, len(parts[least])), least, least if most is None else most)
    suits: Callable[[int], bool] = lambda n: all(_suits(n, most, size, each) for size, each in parts.items())
    return next(n for n in range(top, 0, -1) if n == 1 or suits(n))


def _suits(num: int, most: int | None, batch_size: int, parts: Sequence[np.ndarray]) -> bool:
    # Shards of 3 and 2 files would repeat the files of the smaller ones more often.
    is_even = most is None or most % num == 0 or most >= 10 * num
    return is_even and batch_size % num == 0 and num % len(parts) == 0 and not _divides(num, batch_size, parts)


def _divides(num: int, batch_size: int, parts: Sequence[np.ndarray]) -> bool:
    """Returns whether a process holds some rows of a shard and not all of them."""
    if num == 1:
        return False  # each process opens the stream and uses its rows
    counts = [np.unique(shards_of(part, num, batch_size), return_counts=True)[1] for part in parts]
    return any((each != batch_size // num).any() for each in counts)


def check_shards(
    num: int, most: int | None, batch_size: int, parts: Sequence[np.ndarray], what: str, limit: str = ""
) -> None:
    """Raises ConfigError if a stream cannot be read as `num` shards on these processes. `limit` states why there are at
    most `most`."""
    divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    suitable = [n for n in divisors if (most is None or n <= most) and not _divides(n, batch_size, parts)]
    if batch_size % num:
        raise ConfigError(
            f"{what} is read as {num} shards, and batch_size is {batch_size}. Each shard supplies the same number of "
            f"rows, so data.shards must divide batch_size. It can be {_listed(suitable)}."
        )
    if most is not None and num > most:
        raise ConfigError(
            f"{what} is read as {num} shards, and the stream can be opened as at most {most}: {limit}. Set data.shards "
            f"to {_listed(suitable)}."
        )
    if _divides(num, batch_size, parts):
        processes = [n for n in range(1, num + 1) if num % n == 0]
        raise ConfigError(
            f"{what} is read as {num} shards, and on {len(parts)} processes the rows of a shard would be divided "
            "between processes. A process reads whole shards, and a run keeps its number of shards. Use "
            f"{_listed(processes)} processes; a new run can also set data.shards to {_listed(suitable)}."
        )


def _listed(numbers: Sequence[int]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))
