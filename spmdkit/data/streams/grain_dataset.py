"""grain `IterDataset`: a shard is a part of each `MapDataset` below it, with its exact state."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
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
        return 1 if _part(self._dataset, 0, 2) is None else None

    def open(self, shard: int, num_shards: int, seed: int, epoch: int, state: State | None) -> GrainShard:
        """Returns the part `[shard::num_shards]`. The seed and the epochs are those of the chain (`.repeat()`)."""
        dataset = self._dataset if num_shards == 1 else _part(self._dataset, shard, num_shards)
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


def _part(dataset: Any, shard: int, num_shards: int) -> Any:
    """Returns a copy that reads the elements `[shard::num_shards]` of each source; None if a source has no parts.

    A source is a `MapDataset`, or a dataset with `set_slice`, which grain's worker processes call. Data are shared.
    """
    from spmdkit.data.grain_reader import PartDataset

    is_map: Callable[[Any], bool] = lambda node: isinstance(node, sys.modules["grain"].MapDataset)
    copies, sources, nodes = dict[int, Any](), list[Any](), [dataset]
    for node in nodes:
        maps = [parent for parent in node.parents if is_map(parent)]
        copies |= {id(parent): PartDataset(parent, shard, num_shards) for parent in maps}
        if not maps and hasattr(node, "set_slice"):
            sources.append(node)
        elif not node.parents:
            return None
        nodes += [parent for parent in node.parents if not is_map(parent)]
    copied = copy.deepcopy(dataset, copies)
    for node in sources:
        copies[id(node)].set_slice(slice(shard, None, num_shards))  # deepcopy adds its copies
    return copied


def open_stream(data: Any) -> GrainStream | None:
    """Returns the stream of an `IterDataset`, also of one that a loader built on it."""
    grain = sys.modules.get("grain")
    return GrainStream(data) if grain is not None and isinstance(data, grain.IterDataset) else None
