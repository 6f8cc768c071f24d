"""How coordinator, workers and servers reach each other: the interface, which an implementation in one process
(threads.py) and Ray (actors.py) keep.

A call may be lost with its server, and its answer may be lost after it was done: either raises `Unavailable`, and
whoever called asks again. What makes that safe is the server's (server.py), not the transport's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from spmdkit.foundation.timeouts import TRANSPORT_RETRY_S


class Unavailable(Exception):
    """A server did not answer: it has died, or the way to it has. It may have done what it was asked."""


class Endpoint(Protocol):
    """A server, as others see it. It comes back by itself when it dies, empty."""

    def ask(self, method: str, *args: Any) -> Callable[[], Any]:
        """Starts a call of a method of `Server`; what is returned waits for its answer and raises `Unavailable`."""


class Ending(NamedTuple):
    """How a worker ended: `done`; `failed`, by an error that it would meet again, of a kind and with a text; `lost`,
    without a word."""

    how: str
    kind: str = ""
    text: str = ""


class Running(Protocol):
    """A worker in one of its lives."""

    def ended(self) -> Ending | None:
        """Returns how it ended, None while it runs. Never waits."""

    def kill(self) -> None:
        """Ends it now."""

    @property
    def where(self) -> str:
        """Process and host, as far as known."""


class Transport(Protocol):
    """What starts servers and workers."""

    def server(self, number: int) -> Endpoint:
        """Returns a server, started now, still empty."""

    def worker(self, number: int, incarnation: int, endpoints: Sequence[Endpoint]) -> Running:
        """Returns a worker that has begun to work."""

    def close(self) -> None:
        """Ends everything that was started. May be called twice."""


def ask(
    endpoint: Endpoint,
    method: str,
    *args: Any,
    give_up: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """Returns the answer of a server, asked until it answers.

    Raises:
        Unavailable: it does not, and `give_up` says that this is enough.
    """
    return wait_for(endpoint, endpoint.ask(method, *args), method, *args, give_up=give_up, sleep=sleep)


def wait_for(
    endpoint: Endpoint,
    answer: Callable[[], Any],
    method: str,
    *args: Any,
    give_up: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """Returns the answer to a call that was started, made again as often as it is lost. Raises as `ask`."""
    while True:
        try:
            return answer()
        except Unavailable:
            if give_up():
                raise
            sleep(TRANSPORT_RETRY_S)
            answer = endpoint.ask(method, *args)
