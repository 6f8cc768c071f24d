"""`ServiceProcess`: starts and ends the process that runs JAX's coordination service (service.py). `spmdkit launch` or
process 0 starts it. It runs until all processes have exited."""

from __future__ import annotations

import importlib.util
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from spmdkit.errors import RendezvousError
from spmdkit.foundation.timeouts import SERVICE_HEARTBEAT_S, SERVICE_SHUTDOWN_S, SERVICE_START_S

Start = Callable[..., "subprocess.Popen[Any]"]


class ServiceProcess:
    """A process that runs the coordination service; `process`: the rank of its parent, -1 for a launcher."""

    def __init__(self, num_processes: int, process: int, start: Start = subprocess.Popen):
        jaxlib = importlib.util.find_spec("jaxlib")
        assert jaxlib is not None and jaxlib.origin is not None
        site, program = Path(jaxlib.origin).parents[1], Path(__file__).with_name("service.py")
        words = (program, site, num_processes, SERVICE_HEARTBEAT_S, SERVICE_SHUTDOWN_S, process)
        self._popen = start(
            [sys.executable, "-I", "-S", *map(str, words)],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "NONE"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a reader of process 0's output must not wait for this process to exit
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def listen(self, address: str) -> None:
        """Instructs the process to listen at `address`; see `wait_until_up`."""
        assert self._popen.stdin is not None
        with suppress(OSError):  # it is dead; `wait_until_up` raises
            self._popen.stdin.write(f"{address}\n".encode())
            self._popen.stdin.flush()

    def wait_until_up(self, address: str) -> None:
        """Waits until it listens. Raises RendezvousError if it cannot."""
        output = self._popen.stdout
        assert output is not None
        readable, _, _ = select.select([output], [], [], SERVICE_START_S)
        if not readable or output.readline().strip() != b"up":
            self.kill()
            raise RendezvousError(
                f"the coordination service could not listen at {address}: its process ended with "
                f"{self._popen.returncode}. It needs a free port of this machine. End the process that uses the port, "
                "or choose another port in SPMDKIT_COORDINATOR of all processes."
            )

    def shutdown(self) -> None:
        """Ends it when no process is connected. JAX calls this instead of shutting down its own service."""
        assert self._popen.stdin is not None
        with suppress(OSError):
            self._popen.stdin.close()

    def ended(self) -> int | None:
        return self._popen.poll()

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def reserve_port() -> tuple[socket.socket, int]:
    """Returns a socket that reserves a port of the loopback interface until it is closed, and the port. Linux assigns
    the port to no other process; a process of the same user can listen there with SO_REUSEPORT, as gRPC does."""
    holder = socket.socket()
    if hasattr(socket, "SO_REUSEPORT"):
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("127.0.0.1", 0))
    return holder, int(holder.getsockname()[1])
