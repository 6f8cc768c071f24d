"""`ServiceConnection`: this process's connection to the coordination service, which stays open when the service ends.

JAX's client ends its process by SIGABRT, with a C++ stack, when its connection closes; it has no option for this, and
its Python callback fails (std::bad_cast, jaxlib 0.10.2 to 0.12). The client therefore connects to two threads of its
process that forward all bytes. If the service closes the connection first, they leave the client's side open: its
requests wait, no process is aborted, and `on_lost` ends the process with a message. Cost: 0.01 ms per request (median,
two cores).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, MutableMapping

from spmdkit.foundation.timeouts import SERVICE_CONNECT_S

CHUNK_BYTES = 1 << 16
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy")


class ServiceConnection:
    """Forwards between JAX's client and the service at `service` (HOST:PORT).

    Attributes:
        address: where the client connects, on the loopback interface.
        on_lost: called once, in a separate thread, if the service ends before the client disconnects. None: the
            client's connection closes too.
    """

    def __init__(self, service: str):
        host, _, port = service.rpartition(":")
        self._service = host.strip("[]"), int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.on_lost: Callable[[], None] | None = None
        self._is_lost = threading.Lock()
        self._start(self._accept)

    def close(self) -> None:
        """Accepts no further client. The connected one stays connected."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listener.close()

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=run, args=arguments, name="spmdkit-service", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                service = socket.create_connection(self._service, SERVICE_CONNECT_S)
            except OSError:
                client.close()  # gRPC connects again
                continue
            for end in (client, service):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            left = threading.Event()
            self._start(self._to_service, client, service, left)
            self._start(self._to_client, service, client, left)

    def _to_service(self, client: socket.socket, service: socket.socket, left: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(CHUNK_BYTES):
                service.sendall(data)
            left.set()  # before the service's side closes
        with contextlib.suppress(OSError):
            service.shutdown(socket.SHUT_RDWR)

    def _to_client(self, service: socket.socket, client: socket.socket, left: threading.Event) -> None:
        connected = False
        with service, contextlib.suppress(OSError):
            while data := service.recv(CHUNK_BYTES):
                connected = True
                client.sendall(data)
        if connected and not left.is_set() and self.on_lost is not None:
            if self._is_lost.acquire(blocking=False):
                self.on_lost()
            left.wait()  # keeps the client's side open
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)  # ends the other thread's `recv`
        client.close()


def bypass_proxies(env: MutableMapping[str, str] = os.environ) -> None:
    """Excludes the loopback interface from the proxies that gRPC reads from the environment."""
    if any(name.lower() in PROXIES for name in env):
        others = [env[name] for name in ("no_proxy", "NO_PROXY") if env.get(name)]
        env["no_proxy"] = env["NO_PROXY"] = ",".join(["127.0.0.1", "localhost", *others[:1]])
