"""`SaveBarrier`: the agreement of all processes on the start of a save, the end of all writes, and the result.

orbax waits at a barrier twice per save (all files are written; the step is committed). A process that fails never
reaches the barrier, and the others would wait until `checkpoint.timeout_s`. So it aborts the next barrier, and all
processes fail within seconds.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from spmdkit import compat
from spmdkit.checkpoint.record import first_line
from spmdkit.errors import CheckpointWriteError


class Exchange(Protocol):
    """The methods of `Cluster` that `Checkpoints` uses."""

    def put(self, key: str, value: str) -> None: ...

    def get(self, key: str, timeout_s: float) -> str: ...

    def gather(self, name: str, value: Any, timeout_s: float) -> list[Any]: ...

    def from_main(self, name: str, make: Callable[[], Any], timeout_s: float) -> Any: ...


class SaveResult(NamedTuple):
    """The result of the save in flight: the reason for a failure (or ""), and whether its step is committed."""

    why: str = ""
    committed: bool = False


class SaveBarrier:
    """The barriers of one `Checkpoints`. With one process, or without a cluster, each returns immediately.

    Args:
        timeout_s: maximum time for all processes to write a save.
    """

    def __init__(self, cluster: Exchange | None, num_processes: int, is_main: bool, timeout_s: float):
        self._cluster = cluster if num_processes > 1 else None
        self._num, self._is_main, self._timeout_s = num_processes, is_main, timeout_s
        self._num_begun, self._met, self._is_over = 0, 0, False
        self.is_waiting = False
        """Whether this process waits in the background for the other processes."""

    def begin(self, objection: str) -> None:
        """Starts a save on all processes, or raises the objection of process 0 on all, so that no process waits."""
        if self._cluster is not None:
            objection = self._cluster.from_main("start of a save", lambda: objection, self._timeout_s)
        self._num_begun += 1
        self._met, self._is_over = 0, False
        if objection:
            raise CheckpointWriteError(objection)

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """Returns when all processes have arrived. orbax calls this in the background; its `key` is not used. Raises
        RuntimeError if a process aborts the barrier or does not arrive in time."""
        self._met += 1
        client: Any = compat.coordination_client()
        self.is_waiting = True
        try:
            client.wait_at_barrier(self._name(self._met), timeout_ms, process_ids=list(range(self._num)))
        except RuntimeError:
            self._is_over = True  # for all processes
            raise
        finally:
            self.is_waiting = False

    def wait(self) -> None:
        """Returns when all processes have arrived; runs in the background. Raises RuntimeError if a process aborts the
        barrier or does not arrive in time."""
        if self._cluster is not None:
            self.barrier(key="", timeout_ms=round(1000 * self._timeout_s))

    def gather(self, mine: str) -> list[str]:
        """Waits like `wait`; returns the values of processes 1, 2 ... on process 0, otherwise []. Once per save."""
        if self._cluster is None:
            return []
        key = f"checkpoint/part/{self._num_begun}"
        if not self._is_main:
            self._cluster.put(f"{key}/{jax.process_index()}", mine)
        self.wait()
        others = range(1, self._num if self._is_main else 1)
        return [self._cluster.get(f"{key}/{process}", self._timeout_s) for process in others]

    def give_up(self, error: BaseException) -> None:
        """Aborts the next barrier for the processes that wait in it or enter it later."""
        give_up = getattr(compat.coordination_client(), "give_up", None)  # not in JAX's client: the others then wait
        if self._num > 1 and not self._is_over and give_up is not None:
            self._is_over = True
            give_up(self._name(self._met + 1), f"process {jax.process_index()}: {first_line(error)}")

    def _name(self, number: int) -> str:
        return f"checkpoint/{number}"  # reused by each save: the client counts the visits

    def agreed_result(self, ended: SaveResult) -> SaveResult:
        """Returns the result of the save, the same on every process: a save that fails on one process fails on all."""
        if self._cluster is None:
            return ended
        # A save may end one timeout later in another process.
        gathered = self._cluster.gather("end of a save", list(ended), 2 * self._timeout_s + 60)
        is_timeout = lambda why: any(word in why for word in ("Timed out", "DEADLINE", "ABORTED"))  # in another process
        whys = sorted((why for why, _ in gathered if why), key=is_timeout)
        return SaveResult((whys or [""])[0], gathered[0][1])


def reset_counters() -> None:
    """Resets orbax's operation counter in this process to zero. The number is part of the keys of orbax's barriers, and
    a process that joins a job starts at zero. Private in orbax 0.12; no upstream issue is known."""
    module: Any = sys.modules.get("orbax.checkpoint._src.futures.synchronization")
    if module is not None:
        generator = module.OperationIdGenerator
        generator._operation_id_counter = itertools.count()
        generator._operation_id = next(generator._operation_id_counter)
