"""`sk.parquet`: Parquet files and Arrow files as a stream of row groups. A position is (group, row): exact."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmdkit.data.columns import to_numpy
from spmdkit.data.streams.base import State
from spmdkit.errors import ConfigError


class ParquetStream:
    """A stream over row groups."""

    batched = True

    def __init__(self, groups: list[tuple[str, int]], columns: Sequence[str] | None, shuffle: bool):
        self._groups, self._columns, self._shuffle = groups, columns, shuffle

    def most_shards(self) -> int:
        """Returns the number of row groups."""
        return len(self._groups)

    def open(self, shard: int, num_shards: int, seed: int, epoch: int, state: State | None) -> ParquetShard:
        """Returns every `num_shards`-th group from `shard` on, in the order of this epoch."""
        order = np.arange(len(self._groups))
        if self._shuffle:
            order = np.random.default_rng((seed, epoch)).permutation(order)
        groups = order[shard::num_shards].tolist()
        rng_seed = (seed, epoch) if self._shuffle else None
        return ParquetShard([(*self._groups[i], i) for i in groups], self._columns, rng_seed, state or 0)


class ParquetShard:
    """Some row groups. Its state is the number of the next one."""

    def __init__(
        self, groups: list[tuple[str, int, int]], columns: Sequence[str] | None, seed: tuple[int, ...] | None, next: int
    ):
        self._groups, self._columns, self._seed, self._next = groups, columns, seed, next

    def __next__(self) -> dict[str, np.ndarray]:
        if self._next >= len(self._groups):
            raise StopIteration
        path, group, number = self._groups[self._next]
        self._next += 1
        table = _read(path, group, self._columns)
        rows = {name: to_numpy(name, table[name]) for name in table.column_names}
        if self._seed is None:
            return rows
        order = np.random.default_rng((*self._seed, number)).permutation(table.num_rows)
        return {name: column[order] for name, column in rows.items()}

    def state(self) -> State:
        """Returns the number of the next group."""
        return self._next

    def close(self) -> None:
        """Does nothing: no file is open."""


def parquet(
    files: str | Path | Sequence[str | Path], columns: Sequence[str] | None = None, *, shuffle: bool = True
) -> Any:
    """Returns Parquet files (or Arrow files, `.arrow` or `.feather`) as a stream for `Task(train_data=)`.

    An example is a row: a dict of its columns. Lists must have one length per column.

    Args:
        files: a pattern such as "data/*.parquet", or file names. They are sorted.
        columns: the columns to read; None: all.
        shuffle: draws the order of the row groups, and of the rows of a group, from the seed and the epoch.

    Raises:
        ConfigError: no file matches, or pyarrow is not installed.
    """
    patterns = [files] if isinstance(files, (str, Path)) else files
    paths = sorted({path for pattern in patterns for path in glob.glob(str(pattern), recursive=True)})
    if not paths:
        raise ConfigError(f"sk.parquet: no file matches {files}. Relative paths start at {Path.cwd()}. Correct it.")
    groups = [(path, group) for path in paths for group, rows in enumerate(_group_sizes(path)) if rows]
    return ParquetStream(groups, columns, shuffle)


def _is_arrow(path: str) -> bool:
    return path.endswith((".arrow", ".feather"))


def _group_sizes(path: str) -> list[int]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError("sk.parquet needs pyarrow: pip install pyarrow.") from error
    try:
        if _is_arrow(path):
            with pa.memory_map(path) as source:
                reader = pa.ipc.open_file(source)
                return [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
        with pq.ParquetFile(path) as file:
            return [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"sk.parquet: {path} cannot be read ({error}). Write it as Parquet or an Arrow file."
        ) from error


def _read(path: str, group: int, columns: Sequence[str] | None) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if _is_arrow(path):
        with pa.memory_map(path) as source:
            table = pa.Table.from_batches([pa.ipc.open_file(source).get_batch(group)])
            return table if columns is None else table.select(columns)
    with pq.ParquetFile(path) as file:
        return file.read_row_group(group, columns)


def open_stream(data: Any) -> ParquetStream | None:
    """Returns a stream of `parquet` as it is."""
    return data if isinstance(data, ParquetStream) else None
