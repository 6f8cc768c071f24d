"""The transport between coordinator, workers and servers. threads.py (one process) and actors.py (Ray) implement it.

A call may be lost when its server dies, and a response may be lost after the call was executed. Both raise
`Unavailable`, and the caller repeats the call. The server, not the transport, makes repeated calls safe (server.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from spmdkit.foundation.timeouts import TRANSPORT_RETRY_S


class Unavailable(Exception):
    """A server did not respond: the server or the connection has failed. It may have executed the call."""


class Endpoint(Protocol):
    """The caller's side of a server. A server that dies is restarted automatically, without a state."""

    def call_async(self, method: str, *args: Any) -> Callable[[], Any]:
        """Starts a call of a method of `Server`. The returned function waits for the response and raises
        `Unavailable`."""


class WorkerExit(NamedTuple):
    """How a worker ended: `done`; `failed`, with the kind and text of a permanent error; `lost`, without a report."""

    status: str
    kind: str = ""
    text: str = ""


class WorkerHandle(Protocol):
    """One incarnation of a worker."""

    def ended(self) -> WorkerExit | None:
        """Returns how the worker ended, or None while it runs. Never blocks."""

    @property
    def where(self) -> str:
        """Process and host, if known."""


class Transport(Protocol):
    """Starts servers and workers."""

    def server(self, number: int) -> Endpoint:
        """Returns a new server without a state."""

    def worker(self, number: int, incarnation: int, endpoints: Sequence[Endpoint]) -> WorkerHandle:
        """Starts and returns a worker."""

    def why_waiting(self) -> str:
        """Returns the probable reason why a server or a worker has not started."""

    def close(self) -> None:
        """Stops all started processes. May be called twice."""


def start_call(endpoint: Endpoint, method: str, *args: Any) -> Callable[[Callable[[], bool]], Any]:
    """Starts a call of a server. Returns a function of `give_up` that waits for the response, and repeats the call each
    time it is lost. It raises Unavailable if the server does not respond and `give_up()` returns True."""
    response = endpoint.call_async(method, *args)

    def wait(give_up: Callable[[], bool]) -> Any:
        nonlocal response
        while True:
            try:
                return response()
            except Unavailable:
                if give_up():
                    raise
                time.sleep(TRANSPORT_RETRY_S)
                response = endpoint.call_async(method, *args)

    return wait


def call(endpoint: Endpoint, method: str, *args: Any, give_up: Callable[[], bool] = lambda: False) -> Any:
    """Returns the response of a server; see `start_call`."""
    return start_call(endpoint, method, *args)(give_up)
