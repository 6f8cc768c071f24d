"""Hugging Face `datasets.IterableDataset`: a shard is a part of its files, with their exact state.

- Columns of numbers are read as tables, cut to rows by the reader: ten times as fast as single rows.
- A shuffle buffer is counted: its own state omits the rows in the buffer.
- `interleave_datasets` is opened once. As shards, all parts would draw from the same source at the same time.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from spmdkit.data.columns import to_numpy
from spmdkit.data.streams.base import State
from spmdkit.data.streams.function import IteratorShard

TABLE_ROWS = 100


class HuggingFaceStream:
    """A stream over the files of an `IterableDataset`.

    Attributes:
        batched: it yields tables.
    """

    def __init__(self, dataset: Any):
        features, formatting = dataset.features, dataset._formatting
        is_plain = formatting is None or formatting.format_type is None
        self._has_python_rows = is_plain and features is None
        if is_plain:
            is_table = features is not None and all(map(_is_numeric, features.values()))
            dataset = dataset.with_format("arrow" if is_table else "numpy")
        self.batched = dataset._formatting.is_table
        self._dataset = dataset
        kinds = {type(node).__name__ for node in _nodes(dataset._ex_iterable)}
        self._is_buffered = any("BufferShuffled" in kind for kind in kinds)
        self._is_mixed = any("CyclingMultiSources" in kind for kind in kinds)

    def most_shards(self) -> int:
        """Returns the number of files, or 1 for interleaved data sets."""
        return 1 if self._is_mixed else int(self._dataset.num_shards)

    def open(self, shard: int, num_shards: int, seed: int, epoch: int, state: State | None) -> HuggingFaceShard:
        """Returns every `num_shards`-th file from `shard` on. The seed is that of the data set's `shuffle`."""
        part = self._dataset.shard(num_shards, shard, contiguous=False)  # also of one: the position is in the object
        part.set_epoch(epoch)
        convert = _of_table if self.batched else _of_python if self._has_python_rows else None
        return HuggingFaceShard(part, state, convert, counted=self._is_buffered)


def _is_numeric(feature: Any) -> bool:
    """Returns whether a column needs no decoding. float64 is read by the library's format, as float32."""
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _is_numeric(inner)
    is_number = re.fullmatch(r"bool|u?int\d+|float(16|32)", str(getattr(feature, "dtype", "")))
    return type(feature).__name__ in ("Value", "ClassLabel") and is_number is not None


def _of_table(table: Any) -> dict[str, np.ndarray]:
    return {name: to_numpy(name, table[name]) for name in table.column_names}


def _of_python(row: Any) -> Any:
    # The rows of a `map` without features hold Python numbers, which have no dtype: as elsewhere, floats are float32.
    return {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in row.items()}


class HuggingFaceShard(IteratorShard):
    """A shard of an `IterableDataset`.

    Args:
        convert: applied to each row, or to each table of `TABLE_ROWS` rows.
    """

    def __init__(self, part: Any, state: State | None, convert: Callable[[Any], Any] | None, counted: bool):
        super().__init__(part if convert is None else _Converted(part, convert), state)
        if counted:
            self._get = None

    def close(self) -> None:
        """Closes the iterator in a thread: some sleep 5 s (`datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN`)."""
        threading.Thread(target=super().close, daemon=True).start()


class _Converted:
    def __init__(self, part: Any, convert: Callable[[Any], Any]):
        self._part, self._convert = part, convert
        self.state_dict, self.load_state_dict = part.state_dict, part.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        # A generator, which `close` ends; a `map` would end later, in the thread that reads.
        for x in self._part.iter(batch_size=TABLE_ROWS) if self._convert is _of_table else self._part:
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
