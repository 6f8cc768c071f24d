"""`ProcessSet`: a subset of ranks. Each set has a separate mesh, rounds and queue, so disjoint sets work concurrently.

Source: horovod/common/process_sets.py (Horovod 0.28.1).
"""

from __future__ import annotations

from collections.abc import Sequence

from spmdkit.horovod.negotiation import Blackboard
from spmdkit.horovod.queue import Queue


class ProcessSet:
    """A set of ranks, open after `hvd.init(process_sets=[...])` or `hvd.add_process_set`."""

    process_set_id: int | None = None
    _queue: Queue | None = None

    def __init__(self, ranks: Sequence[int]):
        if isinstance(ranks, str) or any(isinstance(r, bool) or not isinstance(r, int) for r in ranks):
            raise ValueError(
                f"ProcessSet({ranks!r}): it is initialized with a list of ranks, which are integers. An MPI "
                "communicator has no meaning here, since JAX's processes do not use MPI. Try ProcessSet([0, 1])."
            )
        self.ranks: list[int] = sorted(ranks)

    def open(self, number: int, ranks: list[int], board: Blackboard) -> None:
        """Opens the set for operations of its ranks."""
        self.process_set_id, self.ranks, self._rank = number, ranks, board.rank
        self._queue = Queue(board, number, ranks) if board.rank in ranks else None

    def close(self) -> None:
        """Closes the set and drops pending requests."""
        if self._queue is not None:
            self._queue.fail("Horovod has been shut down, or the process set was removed")
        self.process_set_id = self._queue = None

    def size(self) -> int | None:
        """Returns the number of ranks, or None while the set is not open."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Returns the position of this process in the set, or None if the set is not open or does not include it."""
        return self.ranks.index(self._rank) if self.included() else None

    def included(self) -> bool | None:
        """Returns whether this process is in the set, or None while the set is not open."""
        return None if self.process_set_id is None else self._rank in self.ranks

    def queue(self) -> Queue:
        """Returns the queue of the set's operations. Raises ValueError if this process cannot use the set."""
        if self.process_set_id is None and self is global_process_set:
            raise ValueError("Horovod has not been initialized; use hvd.init().")
        if self.process_set_id is None:
            raise ValueError(
                f"{self} is not open. Pass it to hvd.init(process_sets=[...]) or hvd.add_process_set first."
            )
        if self._queue is None:
            raise ValueError(
                f"rank {self._rank} is not in {self}. Only ranks of a set call its operations. Guard the call with "
                "included()."
            )
        return self._queue

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""All ranks, from `init` on."""
