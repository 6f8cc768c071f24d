"""`@sk.stream`: a function `(shard, num_shards, seed) -> iterator` as a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmdkit.data.streams.base import Shard, State
from spmdkit.data.streams.base import open_stream as open_any
from spmdkit.errors import ConfigError

METHODS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
"""Names of the methods that return and restore a position, in the order in which they are looked for."""


class StreamFunction:
    """A stream that a user's function opens.

    Attributes:
        batched: the opened data yield chunks; known after `open`.
    """

    def __init__(self, function: Callable[[int, int, int], Any]):
        self._function, self.batched, self._draws = function, False, dict[tuple[int, str], int]()

    def __call__(self, shard: int, num_shards: int, seed: int) -> Any:
        return self._function(shard, num_shards, seed)

    def most_shards(self) -> None:
        """Returns None: the function opens any number of shards."""

    def open(self, shard: int, num_shards: int, seed: int, epoch: int, state: State | None) -> Shard:
        """Returns what the function returns as a shard. Each epoch has a different seed; that of epoch 0 is `seed`."""
        if epoch:
            seed = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
        opened = self._function(shard, num_shards, seed)
        # A library's object has traps that its module knows. `shard` is already one part of the data.
        library = None if isinstance(opened, StreamFunction) else open_any(opened)
        if library is None:
            return IteratorShard(opened, state)
        self.batched = getattr(library, "batched", False)
        draws = getattr(library, "draws", "")
        if draws and (other := self._draws.setdefault((epoch, draws), shard)) != shard:
            why = getattr(library, "limit", "")
            raise ConfigError(
                f"shards {other} and {shard} of the stream draw the same sources at the same time: {why}."
            )
        return library.open(0, 1, seed, 0, state)


class IteratorShard:
    """A shard of an iterator or an iterable. Its position is that of an object with the methods `METHODS`.

    Args:
        state: restored before the iteration starts.
    """

    def __init__(self, iterable: Any, state: State | None):
        self._get: Callable[[], State] | None = None
        # A loader has a state and its iterator has none (torchdata); or only the iterator has one (grain).
        before = any(hasattr(iterable, name) for names in METHODS for name in names)
        self._iterator = None if before else iter(iterable)
        owner = iterable if before else self._iterator
        for get, restore in METHODS:
            if hasattr(owner, get) and hasattr(owner, restore):
                self._get = getattr(owner, get)
                if state is not None:
                    getattr(owner, restore)(state)
                break
        self._iterator = iter(iterable) if self._iterator is None else self._iterator
        self._next = self._iterator.__next__

    def __next__(self) -> Any:
        return self._next()

    def state(self) -> State | None:
        """Returns the iterator's state; None if it has none."""
        return None if self._get is None else self._get()

    def close(self) -> None:
        """Closes the iterator if it can be closed."""
        getattr(self._iterator, "close", lambda: None)()


def stream(function: Callable[[int, int, int], Any]) -> StreamFunction:
    """Marks a function `(shard, num_shards, seed) -> iterator` as data for `Task(train_data=)`.

    The iterator yields the examples of this shard. The same arguments must give the same examples. An iterator with
    `state_dict` and `load_state_dict`, or `get_state` and `set_state`, is restored by its state; others are read again
    from the start.
    """
    return StreamFunction(function)


def open_stream(data: Any) -> StreamFunction | None:
    """Returns the stream of a function that `@sk.stream` marks."""
    return data if isinstance(data, StreamFunction) else None
