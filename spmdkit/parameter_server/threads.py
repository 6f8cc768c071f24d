"""Servers and workers in this process, for `transport: threads`. A worker is a thread; a call is a function call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from spmdkit.errors import SpmdkitError
from spmdkit.parameter_server.server import Server
from spmdkit.parameter_server.transport import Endpoint, Unavailable, WorkerExit, WorkerHandle
from spmdkit.parameter_server.worker import FencedError, NonFiniteGradient, Worker


class Local:
    """A server in this process."""

    def __init__(self, server: Server):
        self._server = server

    def call_async(self, method: str, *args: Any) -> Callable[[], Any]:
        value = getattr(self._server, method)(*args)
        return lambda: value


class Thread:
    """A worker in a thread."""

    where = "a thread"

    def __init__(self, make: Callable[[Callable[[], bool]], Worker]):
        self._make, self._stopped, self._ended = make, threading.Event(), list[WorkerExit]()
        self._thread = threading.Thread(target=self._run, daemon=True, name="worker")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._make(self._stopped.is_set).run()
            self._ended.append(WorkerExit("done"))
        except (FencedError, Unavailable):
            self._ended.append(WorkerExit("lost"))
        except Exception as error:  # noqa: BLE001  the coordinator reports it
            self._ended.append(failed(error))

    def ended(self) -> WorkerExit | None:
        return self._ended[0] if self._ended else None

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(30)


def failed(error: Exception) -> WorkerExit:
    """Returns the `WorkerExit` of a worker with a permanent error."""
    if isinstance(error, NonFiniteGradient):
        return WorkerExit("failed", "NonFiniteError", str(error))
    if isinstance(error, SpmdkitError):
        return WorkerExit("failed", type(error).__name__, str(error))
    return WorkerExit("failed", "UserCodeError", f"a worker raised {type(error).__name__}: {error}")


class Threads:
    """The transport.

    Args:
        make_server: number -> a server without a state.
        make_worker: (number, incarnation, endpoints, stopped) -> a worker.
    """

    def __init__(
        self,
        make_server: Callable[[int], Server],
        make_worker: Callable[[int, int, Sequence[Endpoint], Callable[[], bool]], Worker],
    ):
        self.make_server, self._make_worker, self.workers = make_server, make_worker, list[Thread]()

    def server(self, number: int) -> Endpoint:
        return Local(self.make_server(number))

    def worker(self, number: int, incarnation: int, endpoints: Sequence[Endpoint]) -> WorkerHandle:
        self.workers.append(Thread(lambda stopped: self._make_worker(number, incarnation, endpoints, stopped)))
        return self.workers[-1]

    def why_waiting(self) -> str:
        return "its thread does not respond"

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()
