"""Servers and workers in this process: a worker is a thread, a call a function call. For tests of the algorithm, and
`transport: threads`.

Servers and workers can be killed, and responses lost, as on a cluster: `kill_server`, `Running.kill`, `loses`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from spmdkit.errors import SpmdkitError
from spmdkit.parameter_server.server import Server
from spmdkit.parameter_server.transport import Ending, Endpoint, Running, Unavailable
from spmdkit.parameter_server.worker import Fenced, NotFinite, Worker


class Killed(BaseException):
    """Raised in the thread of a killed worker at its next call of a server."""


class Local:
    """A server in this process."""

    def __init__(self, make: Callable[[], Server], loses: Callable[[str], bool] = lambda method: False):
        self._make, self._loses = make, loses
        self.server: Server | None = make()

    def kill(self) -> None:
        """Kills the server and its state; it is available again, without a state, for the call after the next."""
        self.server = None

    def ask(self, method: str, *args: Any) -> Callable[[], Any]:
        server = self.server
        if server is None:
            self.server = self._make()
            return _unavailable
        value = getattr(server, method)(*args)
        if self._loses(method) or server is not self.server:
            return _unavailable
        return lambda: value


def _unavailable() -> Any:
    raise Unavailable("the server has died, or its response is lost")


class Thread:
    """A worker in a thread."""

    where = "a thread"

    def __init__(self, make: Callable[[Sequence[Endpoint], Callable[[], bool]], Worker], endpoints: Sequence[Endpoint]):
        self._killed, self._stopped, self._ended = threading.Event(), threading.Event(), list[Ending]()
        watched = [_Mortal(endpoint, self._killed) for endpoint in endpoints]
        self._thread = threading.Thread(target=self._run, args=(make, watched), daemon=True, name="worker")
        self._thread.start()

    def _run(self, make: Any, endpoints: Sequence[Endpoint]) -> None:
        try:
            make(endpoints, self._stopped.is_set).run()
            self._ended.append(Ending("done"))
        except (Killed, Fenced, Unavailable):
            self._ended.append(Ending("lost"))
        except Exception as error:  # noqa: BLE001  told by the coordinator
            self._ended.append(failed(error))

    def ended(self) -> Ending | None:
        return self._ended[0] if self._ended else None

    def kill(self) -> None:
        self._killed.set()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(30)


class _Mortal:
    """A server for a worker that may be killed at any call, before or after it."""

    def __init__(self, endpoint: Endpoint, killed: threading.Event):
        self._endpoint, self._killed = endpoint, killed

    def ask(self, method: str, *args: Any) -> Callable[[], Any]:
        if self._killed.is_set():
            raise Killed
        answer = self._endpoint.ask(method, *args)
        if self._killed.is_set():
            raise Killed
        return answer


def failed(error: Exception) -> Ending:
    """Returns the end of a worker with a permanent error."""
    if isinstance(error, NotFinite):
        return Ending("failed", "NonFiniteError", str(error))
    if isinstance(error, SpmdkitError):
        return Ending("failed", type(error).__name__, str(error))
    return Ending("failed", "UserCodeError", f"a worker raised {type(error).__name__}: {error}")


class Threads:
    """The transport.

    Args:
        make_server: number -> a server without a state.
        make_worker: (number, incarnation, endpoints, stopped) -> a worker.
        loses: method -> whether the response to this call is lost after it was executed.
    """

    def __init__(
        self,
        make_server: Callable[[int], Server],
        make_worker: Callable[[int, int, Sequence[Endpoint], Callable[[], bool]], Worker],
        loses: Callable[[str], bool] = lambda method: False,
    ):
        self._make_server, self._make_worker, self._loses = make_server, make_worker, loses
        self.servers: list[Local] = []
        self.workers: list[Thread] = []

    def server(self, number: int) -> Endpoint:
        self.servers.append(Local(lambda: self._make_server(number), self._loses))
        return self.servers[-1]

    def worker(self, number: int, incarnation: int, endpoints: Sequence[Endpoint]) -> Running:
        make = lambda endpoints, stopped: self._make_worker(number, incarnation, endpoints, stopped)
        self.workers.append(Thread(make, endpoints))
        return self.workers[-1]

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()
