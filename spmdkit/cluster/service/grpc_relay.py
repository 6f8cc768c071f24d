"""`Relay`: a proxy between the clients of the coordination service and the service, for clients that are suspended.

gRPC's server sends an HTTP/2 PING about every second to estimate the bandwidth, and closes a connection that does not
reply for 60 s. JAX has no option for this. The client then aborts its process with SIGABRT (jaxlib 0.10.2, 2026-11-23:
a job that was suspended for five minutes). The relay replies to PINGs in place of the client. Everything else is
forwarded unchanged, frame by frame (RFC 9113, section 4.1: 3 bytes length, type, flags, 4 bytes stream). `service.py`
uses it, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import selectors
import socket

PREFACE_BYTES, HEADER_BYTES = 24, 9
PING, ACK = 6, 1
READ_BYTES, MOST_PENDING_BYTES = 1 << 16, 1 << 22


class Side:
    """One of the two connections of a pair.

    Attributes:
        other: the other one.
        preface: bytes before the first frame.
        read: received bytes that are not a whole frame yet.
        pending: bytes still to be sent.
        is_server: the connection of the service; the relay replies to its PINGs.
    """

    def __init__(self, connection: socket.socket, preface: int, is_server: bool):
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.preface, self.is_server, self.closed = connection, preface, is_server, False
        self.other: Side = self
        self.read, self.pending = bytearray(), bytearray()

    def take(self) -> bool:
        """Reads available bytes and forwards whole frames; returns False at the end."""
        try:
            data = self.connection.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.read += data
        if self.preface:
            if len(self.read) < self.preface:
                return bool(data)
            self.other.pending += self.read[: self.preface]
            del self.read[: self.preface]
            self.preface = 0
        self._pass_frames()
        return bool(data)

    def _pass_frames(self) -> None:
        begin = at = 0
        while len(self.read) - at >= HEADER_BYTES:
            end = at + HEADER_BYTES + int.from_bytes(self.read[at : at + 3], "big")
            if len(self.read) < end:
                break
            if self.is_server and self.read[at + 3] == PING and not self.read[at + 4] & ACK:
                self.other.pending += self.read[begin:at]
                self.pending += self.read[at : at + 4] + bytes([ACK]) + self.read[at + 5 : end]
                begin = end
            at = end
        self.other.pending += self.read[begin:at]
        del self.read[:at]

    def send(self) -> bool:
        """Sends pending bytes without blocking; returns False at the end."""
        try:
            while self.pending:
                del self.pending[: self.connection.send(self.pending[: 1 << 20])]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


class Relay:
    """Listens at `address` and connects each client to the service at `service`.

    Attributes:
        num_connected: how many clients there are.
    """

    def __init__(self, listener: socket.socket, service: tuple[str, int]):
        self._listener, self._service = listener, service
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self.num_connected = 0

    def turn(self, patience_s: float) -> None:
        """Forwards what arrives within `patience_s`, once."""
        for key, events in self._selector.select(patience_s):
            side: Side | None = key.data
            if side is None:
                self._accept()
            elif not side.closed:  # in this turn
                alive = not events & selectors.EVENT_READ or side.take()
                alive = side.send() and side.other.send() and alive
                if alive:
                    self._expect(side)
                    self._expect(side.other)
                else:
                    self._close(side)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        client = Side(connection, PREFACE_BYTES, is_server=False)
        try:
            server = Side(socket.create_connection(self._service, timeout=5.0), 0, is_server=True)
        except OSError:
            connection.close()
            return
        client.other, server.other = server, client
        for side in (client, server):
            self._selector.register(side.connection, selectors.EVENT_READ, side)
        self.num_connected += 1

    def _expect(self, side: Side) -> None:
        """Waits for what a side can do next: it is not read while the other one cannot take more."""
        reads = selectors.EVENT_READ if len(side.other.pending) < MOST_PENDING_BYTES else 0
        writes = selectors.EVENT_WRITE if side.pending else 0
        self._selector.modify(side.connection, reads | writes or selectors.EVENT_WRITE, side)

    def _close(self, side: Side) -> None:
        for each in (side, side.other):
            self._selector.unregister(each.connection)
            each.connection.close()
            each.closed = True
        self.num_connected -= 1
