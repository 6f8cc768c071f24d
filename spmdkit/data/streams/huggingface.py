"""Hugging Face `datasets.IterableDataset`: a shard is a part of its files, with their exact state.

- Columns of numbers are read as tables, cut to rows by the reader: ten times as fast as single rows.
- A shuffle buffer is counted: its own state omits the rows in the buffer.
- `interleave_datasets` is opened once. As shards, all parts would draw from the same source at the same time.
- Some iterators sleep 5 s at their end, so that threads of Arrow end before the interpreter (apache/arrow issue 45214).
  The sleep is postponed to the exit of the interpreter.
"""

from __future__ import annotations

import atexit
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from spmdkit.data.columns import to_numpy
from spmdkit.data.streams.base import State
from spmdkit.data.streams.function import IteratorShard
from spmdkit.errors import ConfigError

TABLE_ROWS = 100
INTERLEAVED = (
    "with interleave_datasets before shard, all shards would read from the same source at the same time. Shard each "
    "source first, in a function under @sk.stream: interleave_datasets([a.shard(num_shards, shard), "
    "b.shard(num_shards, shard)], seed=seed + shard)"
)


class HuggingFaceStream:
    """A stream over the files of an `IterableDataset`.

    Attributes:
        batched: it yields tables.
        draws: the states of the generators that choose a source; empty if none does.
        limit: why it has no more shards.
    """

    def __init__(self, dataset: Any):
        features, formatting = dataset.features, dataset._formatting
        form = None if formatting is None else formatting.format_type
        is_numeric = features is not None and all(map(_is_numeric, features.values()))
        if form is None or (form == "numpy" and is_numeric):
            dataset = dataset.with_format("arrow" if is_numeric else "numpy")
        self.batched = dataset._formatting.is_table
        of_rows = _of_python if form is None and features is None else None
        self._convert = of_rows if not self.batched else _of_wide_table if form == "numpy" else _of_table
        self._dataset = dataset
        nodes = list(_nodes(dataset._ex_iterable))
        self._is_buffered = any("BufferShuffled" in type(node).__name__ for node in nodes)
        _refuse_random_seeds(nodes)
        mixed = [node for node in nodes if "CyclingMultiSources" in type(node).__name__]
        self._has_threads = any("InterleavedShards" in type(node).__name__ for node in nodes) or bool(mixed)
        self._is_mixed, self.limit = bool(mixed), INTERLEAVED if mixed else "it has that many files"
        self.draws = "".join(str(node.generator.bit_generator.state) for node in mixed if hasattr(node, "generator"))

    def most_shards(self) -> int:
        """Returns the number of files, or 1 for interleaved data sets."""
        return 1 if self._is_mixed else int(self._dataset.num_shards)

    def open(self, shard: int, num_shards: int, seed: int, epoch: int, state: State | None) -> HuggingFaceShard:
        """Returns every `num_shards`-th file from `shard` on. The seed is that of the data set's `shuffle`."""
        part = self._dataset.shard(num_shards, shard, contiguous=False)  # also of one: the position is in the object
        part.set_epoch(epoch)
        _postpone_sleep()
        return HuggingFaceShard(part, state, self._convert, self._is_buffered, self._has_threads)


def _refuse_random_seeds(nodes: list[Any]) -> None:
    """Raises ConfigError for `shuffle` or `interleave_datasets` without a seed: numpy then draws 128 bits."""
    for generator in (node.generator for node in nodes if hasattr(node, "generator")):
        entropy = generator.bit_generator.seed_seq.entropy
        if isinstance(entropy, int) and entropy >= 2**64:
            raise ConfigError(
                "train_data is an IterableDataset that shuffles or interleaves without a seed, so a restarted run "
                "would read other examples. A restart must read the same order. Pass seed=0 there: shuffle(seed=0, "
                "buffer_size=...)."
            )


def _is_numeric(feature: Any) -> bool:
    """Returns whether a column needs no decoding. float64 is read by the library's format, as float32."""
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _is_numeric(inner)
    is_number = re.fullmatch(r"bool|u?int\d+|float(16|32)", str(getattr(feature, "dtype", "")))
    return type(feature).__name__ in ("Value", "ClassLabel") and is_number is not None


def _of_table(table: Any) -> dict[str, np.ndarray]:
    return {name: to_numpy(name, table[name]) for name in table.column_names}


def _of_wide_table(table: Any) -> dict[str, np.ndarray]:
    """Returns the columns in the dtypes of the library's numpy format: arrays of int64 and float32."""
    kinds = {"i": np.int64, "u": np.int64, "f": np.float32}
    return {
        name: x.astype(kinds.get(x.dtype.kind, x.dtype), copy=False) if x.ndim > 1 else x
        for name, x in _of_table(table).items()
    }


def _of_python(row: Any) -> Any:
    # The rows of a `map` without features hold Python numbers, which have no dtype: as elsewhere, floats are float32.
    return {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in row.items()}


class HuggingFaceShard(IteratorShard):
    """A shard of an `IterableDataset`.

    Args:
        convert: applied to each row, or to each table of `TABLE_ROWS` rows.
        counted: its state is not used.
        has_threads: threads read it, which end some seconds after it.
    """

    def __init__(
        self, part: Any, state: State | None, convert: Callable[[Any], Any] | None, counted: bool, has_threads: bool
    ):
        self._has_threads = has_threads
        super().__init__(part if convert is None else _Converted(part, convert), state)
        if counted:
            self._get = None

    def close(self) -> None:
        """Closes the iterator."""
        super().close()
        if self._has_threads:
            _SLEEP["until"] = time.monotonic() + _SLEEP["seconds"]


_SLEEP = {"seconds": 0.0, "until": 0.0}
"""The postponed sleep: its length, and its end after the last close."""


def _postpone_sleep() -> None:
    config = sys.modules["datasets"].config
    if config.SLEEP_TIME_ON_THREADS_SHUTDOWN:
        _SLEEP["seconds"], config.SLEEP_TIME_ON_THREADS_SHUTDOWN = config.SLEEP_TIME_ON_THREADS_SHUTDOWN, 0
        atexit.register(lambda: time.sleep(max(0.0, _SLEEP["until"] - time.monotonic())))


TABLES = (_of_table, _of_wide_table)


class _Converted:
    def __init__(self, part: Any, convert: Callable[[Any], Any]):
        self._part, self._convert = part, convert
        self.state_dict, self.load_state_dict = part.state_dict, part.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        # A generator, which `close` ends; a `map` would end later, in the thread that reads.
        for x in self._part.iter(batch_size=TABLE_ROWS) if self._convert in TABLES else self._part:
            yield self._convert(x)


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in (getattr(node, "ex_iterable", None), *(getattr(node, "ex_iterables", None) or ())):
        if child is not None:
            yield from _nodes(child)


def open_stream(data: Any) -> HuggingFaceStream | None:
    """Returns the stream of a `datasets.IterableDataset`."""
    datasets = sys.modules.get("datasets")
    return HuggingFaceStream(data) if datasets is not None and isinstance(data, datasets.IterableDataset) else None
