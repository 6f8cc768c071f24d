"""The interface of a stream: data that is read as independent iterators, the shards.

A module of this folder defines

    open_stream(data) -> Stream | None     the stream of data of its kind; None for all other data

It imports its library only if the data are of that library (`sys.modules`). Another distribution declares the same
function as an entry point `spmdkit.streams`. A stream with an attribute `batched = True` always yields chunks of rows;
an attribute `limit` states why it has no more shards than `most_shards()`, and the repair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from spmdkit.foundation import plugins

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


def open_stream(data: Any) -> Stream | None:
    """Returns data as a stream; None if no module of this folder opens them."""
    if isinstance(data, Stream):
        return data
    openers: dict[str, Callable[[Any], Stream | None]] = plugins.load_all("streams")
    return next((opened for opener in openers.values() if (opened := opener(data)) is not None), None)
