"""`CollectiveTransport`: shuts down the Gloo connections of this process, to end a collective that cannot complete.

Gloo's all-reduce is a ring. When a process dies, its two neighbors get an error. The others wait indefinitely for a
live neighbor that has already failed (n >= 4). XLA has one timeout for all collectives of a run. Once the launcher
reports a death, each process shuts down its connections, and the collective fails within milliseconds.

This works on Linux. On other systems no sockets are listed, and the timeout applies.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator


class CollectiveTransport:
    """The connections of one backend. `local_ports`: those on which this process listens; `all_ports`: of all."""

    def __init__(self) -> None:
        self.local_ports: list[int] = []
        self.all_ports: set[int] = set()

    @contextlib.contextmanager
    def record_ports(self) -> Iterator[None]:
        """Records the ports on which listening starts during the body, which creates the backend."""
        before = _listening()
        yield
        self.local_ports = sorted(_listening() - before)

    def shut_down(self) -> int:
        """Shuts down all collective connections to other processes; returns their number. Callable from any thread."""
        ports, num = self.all_ports | set(self.local_ports), 0
        for connection in _sockets():
            with connection, contextlib.suppress(OSError):
                if not _listens(connection) and (
                    _port(connection) in self.local_ports or connection.getpeername()[1] in ports
                ):
                    connection.shutdown(socket.SHUT_RDWR)
                    num += 1
        return num


def _listening() -> set[int]:
    ports = set()
    for connection in _sockets():
        with connection:
            if _listens(connection):
                ports.add(_port(connection))
    return ports


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _port(connection: socket.socket) -> int:
    return int(connection.getsockname()[1])


def _sockets() -> Iterator[socket.socket]:
    """Yields the TCP sockets of this process, each with a duplicated descriptor."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return
    for name in names:
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # already closed
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
            yield connection
        else:
            connection.close()
