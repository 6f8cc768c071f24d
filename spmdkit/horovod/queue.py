"""The pending requests of a rank in a process set: `Handle` and `Queue`. Operations run in the rounds of
negotiation.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from spmdkit.horovod.collectives import Wire
from spmdkit.horovod.negotiation import JOIN, Blackboard, HorovodInternalError, Rounds, decide


class Handle:
    """One asynchronous operation and its future result. `request`: the request, as sent to the other ranks."""

    def __init__(self, queue: Queue, request: dict[str, Any], arrays: Any, error: Exception | None = None):
        self.queue, self.request, self.arrays = queue, request, arrays
        self._own_error = error
        self.error: Exception | None = None
        self.result: Any = None
        self.is_done = self._is_of_one = False

    def of_one(self) -> Handle:
        """Returns this handle, with a single array instead of a list as its result."""
        self._is_of_one = True
        return self

    def finish(self, result: Any) -> None:
        """Stores the result and releases the input arrays."""
        self.result, self.arrays, self.is_done = result[0] if self._is_of_one else result, [], True

    def fail(self, why: str) -> None:
        """Stores the error: this rank's exception unchanged, otherwise the message for all ranks."""
        self.error, self.arrays, self.is_done = self._own_error or HorovodInternalError(why), [], True


class Queue:
    """The pending requests to one process set, in order, and the rounds in which they run."""

    def __init__(self, board: Blackboard, number: int, ranks: Sequence[int]):
        self.ranks, self.rank = list(ranks), board.rank
        self._rounds, self._wire = Rounds(board, number, ranks), Wire(ranks, board.rank)
        self._pending: dict[str, Handle] = {}
        self._num_rounds = self._num_unnamed = 0
        self._joined: dict[int, int] = {}

    def enqueue(
        self,
        request: dict[str, Any],
        arrays: Sequence[jax.Array] = (),
        name: str | None = None,
        error: Exception | None = None,
    ) -> Handle:
        """Returns the handle of an operation that runs in a later round. `error`: this rank's error, raised on all
        ranks. Raises ValueError if an operation of this name is pending."""
        if name is None:
            name = f"noname.{self._num_unnamed}"
            self._num_unnamed += 1
        if name in self._pending:
            raise ValueError(
                f"Requested to {request['op']} an array with the same name as another that is being processed: "
                f"{name!r}. A name can be used again after its result was returned. Call hvd.synchronize first, or use "
                "another name."
            )
        fault = {} if error is None else {"fault": str(error)}
        handle = Handle(self, {"name": name, **request, **fault}, list(arrays), error)
        self._pending[name] = handle
        return handle

    def wait(self, handle: Handle) -> Any:
        """Takes part in rounds until an operation has run, and returns its result. Raises HorovodInternalError if it
        cannot run."""
        while not handle.is_done:
            self.step()
        if handle.error is not None:
            raise handle.error
        return handle.result

    def join(self) -> int:
        """Contributes zeros until all ranks have joined. Returns the rank that joined last (the highest, if several
        joined in one round)."""
        return int(self.wait(self.enqueue({"op": JOIN}, name=JOIN)))

    def fail(self, why: str) -> None:
        """Drops all requests."""
        for handle in self._pending.values():
            handle.fail(why)
        self._pending.clear()

    def step(self) -> None:
        """Exchanges requests once, and runs or fails operations by the decision."""
        requests = [handle.request | {"unnamed": self._num_unnamed} for handle in self._pending.values()]
        try:
            table = self._rounds.exchange(requests)
        except HorovodInternalError as error:
            return self.fail(str(error))
        self._num_rounds += 1
        decision = decide(table)
        for name, why in decision.errors.items():
            if name in self._pending:
                self._pending.pop(name).fail(why)
        for name, by_rank in decision.run:
            self._run(self._pending.pop(name, None), by_rank)
        for rank in decision.joined:
            self._joined.setdefault(rank, self._num_rounds)
        if decision.deadlock is not None or len(decision.joined) == len(self.ranks):
            # Realigns the numbers of unnamed calls, since ranks may have made different numbers of them.
            self._num_unnamed = max(request["unnamed"] for requested in table.values() for request in requested)
        if len(decision.joined) == len(self.ranks):
            self._pending.pop(JOIN).finish(max(self._joined, key=lambda rank: (self._joined[rank], rank)))
            self._joined = {}
        elif decision.deadlock is not None:
            joined = self._pending.pop(JOIN, None)
            self.fail(decision.deadlock)
            if joined is not None:
                self._pending[JOIN] = joined  # the rank still contributes zeros to ranks that catch the error

    def _run(self, handle: Handle | None, by_rank: dict[int, dict[str, Any] | None]) -> None:
        """Runs an operation. A rank that has joined takes part without a handle."""
        handle = handle or Handle(self, next(request for request in by_rank.values() if request is not None), None)
        try:
            handle.finish(self._wire.run(handle.arrays, by_rank))
        except (RuntimeError, ValueError) as error:  # an error of XLA: a peer exited during the operation
            handle.fail(f"{handle.request['op']} {handle.request['name']!r} failed on rank {self.rank}: {error}")


def synchronize(handle: Handle) -> Any:
    """Waits for and returns the result of an asynchronous operation. Raises HorovodInternalError if it failed."""
    result = handle.queue.wait(handle)
    try:
        return jax.block_until_ready(result)
    except RuntimeError as error:
        raise HorovodInternalError(f"{handle.request['op']} {handle.request['name']!r} failed: {error}") from error


def poll(handle: Handle) -> bool:
    """Returns whether the result is available. The call takes part in a round, so it blocks until the other ranks do
    too."""
    if not handle.is_done:
        handle.queue.step()
    leaves = jax.tree.leaves(handle.result)
    return handle.is_done and all(leaf.is_ready() for leaf in leaves if hasattr(leaf, "is_ready"))
