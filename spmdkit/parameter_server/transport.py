"""The transport between coordinator, workers and servers: the interface of threads.py (one process) and actors.py
(Ray).

A call may be lost with its server, and its response may be lost after it was executed: either raises `Unavailable`, and
the caller repeats the call. The server makes this safe (server.py), not the transport.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from spmdkit.foundation.timeouts import TRANSPORT_RETRY_S


class Unavailable(Exception):
    """A server did not respond: it, or the connection to it, has failed. It may have executed the call."""


class Endpoint(Protocol):
    """A server for its callers. It restarts automatically when it dies, without a state."""

    def ask(self, method: str, *args: Any) -> Callable[[], Any]:
        """Starts a call of a method of `Server`; the result waits for the response and raises `Unavailable`."""


class Ending(NamedTuple):
    """How a worker ended: `done`; `failed`, by a permanent error, of a kind and with a text; `lost`, without a
    report."""

    how: str
    kind: str = ""
    text: str = ""


class Running(Protocol):
    """A worker in one incarnation."""

    def ended(self) -> Ending | None:
        """Returns how it ended, None while it runs. Never waits."""

    @property
    def where(self) -> str:
        """Process and host, as far as known."""


class Transport(Protocol):
    """Starts servers and workers."""

    def server(self, number: int) -> Endpoint:
        """Returns a new server without a state."""

    def worker(self, number: int, incarnation: int, endpoints: Sequence[Endpoint]) -> Running:
        """Returns a worker that is running."""

    def close(self) -> None:
        """Stops all started processes. May be called twice."""


def call(endpoint: Endpoint, method: str, *args: Any) -> Callable[[Callable[[], bool]], Any]:
    """Starts a call of a server. Returns a function of `give_up` that waits for the response, and repeats the call as
    often as it is lost. It raises Unavailable if the server does not respond, and `give_up()` ends the wait."""
    answer = endpoint.ask(method, *args)

    def wait(give_up: Callable[[], bool]) -> Any:
        nonlocal answer
        while True:
            try:
                return answer()
            except Unavailable:
                if give_up():
                    raise
                time.sleep(TRANSPORT_RETRY_S)
                answer = endpoint.ask(method, *args)

    return wait


def ask(endpoint: Endpoint, method: str, *args: Any, give_up: Callable[[], bool] = lambda: False) -> Any:
    """Returns the response of a server; see `call`."""
    return call(endpoint, method, *args)(give_up)
