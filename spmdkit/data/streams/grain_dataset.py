"""grain `IterDataset`: a shard is a slice of each `MapDataset` below it, with its exact state."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from typing import Any

from spmdkit.data.streams.base import State
from spmdkit.data.streams.function import IteratorShard


class GrainStream:
    """A stream over an `IterDataset`.

    Attributes:
        batched: `.batch` is in its chain.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset
        kinds = [type(node).__name__ for node in _nodes(dataset)]
        self.batched = any(k.startswith("Batch") for k in kinds) and not any("FlatMap" in k for k in kinds)

    def most_shards(self) -> int | None:
        """Returns None, or 1 if a source of the chain has no slices."""
        return 1 if _sliced(self._dataset, slice(0, None, 2)) is None else None

    def open(self, shard: int, num_shards: int, seed: int, epoch: int, state: State | None) -> GrainShard:
        """Returns the slice `[shard::num_shards]`. The seed and the epochs are those of the chain (`.repeat()`)."""
        dataset = self._dataset if num_shards == 1 else _sliced(self._dataset, slice(shard, None, num_shards))
        return GrainShard(iter(dataset), state)


class GrainShard(IteratorShard):
    """An iterator of grain. Its state is stored as text, since grain may update the dict that it returned."""

    def __init__(self, iterator: Any, state: State | None):
        super().__init__(iterator, json.loads(state) if isinstance(state, str) else state)

    def state(self) -> State:
        """Returns the state as JSON, or as bytes if it is bytes."""
        state = super().state()
        return state if isinstance(state, bytes) else json.dumps(state)


def _nodes(dataset: Any) -> Iterator[Any]:
    yield dataset
    for parent in getattr(dataset, "parents", ()):
        yield from _nodes(parent)


def _sliced(dataset: Any, part: slice) -> Any:
    """Returns a copy with slices of the data, as grain's own worker processes read them; None if it has none. The data
    are shared."""
    maps = [node for node in _nodes(dataset) if isinstance(node, sys.modules["grain"].MapDataset)]
    dataset = copy.deepcopy(dataset, {id(node): node for node in maps})
    nodes = [dataset]
    for node in nodes:
        if hasattr(node, "set_slice"):
            node.set_slice(part)
        elif not node.parents:
            return None
        else:
            nodes += node.parents
    return dataset


def open_stream(data: Any) -> GrainStream | None:
    """Returns the stream of an `IterDataset`, also of one that a loader built on it."""
    grain = sys.modules.get("grain")
    return GrainStream(data) if grain is not None and isinstance(data, grain.IterDataset) else None
