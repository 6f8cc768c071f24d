"""`Relay`: a proxy between the coordination service and its clients, for clients that are suspended.

gRPC's server sends an HTTP/2 PING about every second to estimate the bandwidth, and closes a connection that does not
reply for 60 s. JAX has no option for this. The client then aborts its process with SIGABRT (jaxlib 0.10.2, 2026-11-23:
a job that was suspended for five minutes). The relay replies to PINGs for the client. It forwards everything else
unchanged, frame by frame (RFC 9113, section 4.1: 3 bytes length, type, flags, 4 bytes stream). `service.py` uses it, so
it imports only the standard library.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

PREFACE_BYTES, HEADER_BYTES = 24, 9
PING, ACK = 6, 1
CONNECT_S = 5.0


class Relay:
    """Connects each client to the service at `service`. `connect` is called for each client.

    Attributes:
        num_connected: number of clients.
    """

    def __init__(self, service: tuple[str, int]):
        self._service = service
        self.num_connected = 0

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards between a client and the service until one of them closes its connection."""
        self.num_connected += 1
        # asyncio sets it only if the listener was created with a protocol number. Without it each reply takes 40 ms.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.closing(writer), contextlib.suppress(OSError):
            opened = asyncio.open_connection(*self._service)
            service_reader, service_writer = await asyncio.wait_for(opened, CONNECT_S)
            with contextlib.closing(service_writer):
                pumps = [
                    asyncio.ensure_future(_forward(reader, service_writer, None)),
                    asyncio.ensure_future(_forward(service_reader, writer, service_writer)),
                ]
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        self.num_connected -= 1


async def _forward(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, pinging: asyncio.StreamWriter | None
) -> None:
    """Forwards frames. `pinging`: the connection to the service, which sends the PINGs. A source is not read while the
    target's buffer is full."""
    if pinging is None:
        target.write(await source.readexactly(PREFACE_BYTES))
    while True:
        header = await source.readexactly(HEADER_BYTES)
        frame = header + await source.readexactly(int.from_bytes(header[:3], "big"))
        if pinging is not None and header[3] == PING and not header[4] & ACK:
            pinging.write(frame[:4] + bytes([ACK]) + frame[5:])
        else:
            target.write(frame)
            await target.drain()
