"""`tf.data.Dataset`: a shard is `dataset.shard`, with the state of its iterator if that is at most 1 MiB.

The state holds the elements in shuffle buffers. Above 1 MiB per shard, examples are counted.
"""

from __future__ import annotations

import sys
from typing import Any

from spmdkit.data.streams.base import State

MOST_BYTES = 2**20


class TensorFlowStream:
    """A stream over a `tf.data.Dataset`.

    Attributes:
        batched: `batch` is its last transformation.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self.batched = type(dataset).__name__.lstrip("_").removeprefix("Parallel") == "BatchDataset"

    def most_shards(self) -> int | None:
        """Returns None, or 1 for batches, which `shard` would deal whole."""
        return 1 if self.batched else None

    def open(self, shard: int, num_shards: int, seed: int, epoch: int, state: State | None) -> TensorFlowShard:
        """Returns every `num_shards`-th element from `shard` on. The seeds are those of the dataset."""
        return TensorFlowShard(self._dataset.shard(num_shards, shard) if num_shards > 1 else self._dataset, state)


class TensorFlowShard:
    """An iterator of TensorFlow."""

    def __init__(self, dataset: Any, state: State | None):
        self._tf, self._iterator, self._has_state = sys.modules["tensorflow"], iter(dataset), True
        if state is not None:
            variant = self._tf.io.parse_tensor(state, self._tf.variant)
            self._tf.raw_ops.DeserializeIterator(resource_handle=self._iterator._iterator_resource, serialized=variant)

    def __next__(self) -> Any:
        return self._tf.nest.map_structure(lambda x: x.numpy(), next(self._iterator))

    def state(self) -> State | None:
        """Returns what `tf.train.Checkpoint` writes; None if it has no state, or one above `MOST_BYTES`."""
        if not self._has_state:
            return None
        try:
            variant = self._tf.raw_ops.SerializeIterator(
                resource_handle=self._iterator._iterator_resource, external_state_policy=2
            )
        except self._tf.errors.OpError:  # such as a Python generator
            self._has_state = False
            return None
        state: bytes = self._tf.io.serialize_tensor(variant).numpy()
        self._has_state = len(state) <= MOST_BYTES
        return state if self._has_state else None

    def close(self) -> None:
        """Releases the iterator."""
        self._iterator = None


def open_stream(data: Any) -> TensorFlowStream | None:
    """Returns the stream of a `tf.data.Dataset`."""
    tf = sys.modules.get("tensorflow")
    return TensorFlowStream(data) if tf is not None and isinstance(data, tf.data.Dataset) else None
