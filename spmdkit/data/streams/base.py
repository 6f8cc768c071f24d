"""The interface of a stream: data that is read as independent iterators, the shards.

A module of this folder defines

    open_stream(data) -> Stream | None     the stream of data of its kind; None for all other data

It imports its library only if the data are of that library (`sys.modules`). Another distribution declares the same
function as an entry point `spmdkit.streams`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

State = Any
"""The state of an iterator: JSON values, bytes, numpy arrays, tuples, dicts. Never a pickle."""


class Shard(Protocol):
    """One open shard."""

    def __next__(self) -> Any:
        """Returns the next example, or with `data.batched` a chunk of rows. Raises StopIteration at the end."""

    def state(self) -> State | None:
        """Returns a copy of the position, before the next example; None if examples can only be counted."""

    def close(self) -> None:
        """Releases files, threads and processes."""


@runtime_checkable
class Stream(Protocol):
    """Data that can be opened as shards. The same arguments give the same examples in the same order."""

    def most_shards(self) -> int | None:
        """Returns the largest number of shards, such as the number of files; None: any; 1: it cannot be sharded."""

    def open(self, shard: int, num_shards: int, seed: int, epoch: int, state: State | None) -> Shard:
        """Returns a shard, at its first example in `epoch` or where `state` was taken."""
