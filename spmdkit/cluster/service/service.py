"""JAX's coordination service in a separate process, so that any process of the job may die. `process.py` runs this file
by path.

    python -I -S service.py SITE NUM_PROCESSES HEARTBEAT_S SHUTDOWN_S PROCESS

It imports only jaxlib and the standard library. A line on standard input is the address to listen at; it prints `up`.
It runs until its standard input closes or its parent has exited, then up to one minute while processes are connected:
JAX aborts a process (SIGABRT) that loses the service. PROCESS is the rank of the parent (-1: a launcher). The service
reports the parent's exit in the store.

`recoverable` (jaxlib 0.10.2 to 0.12): without it, a clock that is set back makes all processes look lost, and aborts
the job. The watchdog detects lost processes (faults/watchdog.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I omits it
from grpc_relay import Relay

POLL_S = 0.05
LINGER_S = 60.0
"""The longest time that it runs for connected processes after its parent has exited."""
ANNOUNCE_S = 5
BACKLOG = 1024
IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Slurm's notice, `scancel` and signals to a process group reach every process of a job, including this one. The others
need the service to save and exit with 42."""
KILLED = "it ended without an error report: killed, out of memory, or os._exit"


def main(site: str, num_processes: int, heartbeat_s: int, shutdown_s: int, process: int) -> None:
    """Runs the service until it is no longer needed."""
    parent = os.getppid()
    for name in IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    sys.path.append(site)
    import jaxlib._jax as jaxlib

    address = sys.stdin.readline().strip()
    if not address:
        return
    listener = _listen(address, is_reserved=process < 0)
    with socket.socket() as holder:  # reserves the port of the service until gRPC shares it
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        inner = holder.getsockname()
        service = jaxlib.get_distributed_runtime_service(
            f"127.0.0.1:{inner[1]}",
            num_processes,
            heartbeat_timeout=heartbeat_s,
            shutdown_timeout=shutdown_s,
            recoverable=True,
        )
    asyncio.run(_serve(Relay(inner), listener, parent, lambda: _report_exit(jaxlib, f"127.0.0.1:{inner[1]}", process)))
    del service
    os._exit(0)


async def _serve(relay: Relay, listener: socket.socket, parent: int, announce: Callable[[], None]) -> None:
    """Relays until no process needs the service."""
    server = await asyncio.start_server(relay.connect, sock=listener, backlog=BACKLOG)
    print("up", flush=True)
    while not (ended := _exit_reason(parent)):
        await asyncio.sleep(POLL_S)
    await asyncio.sleep(POLL_S)  # includes a process that has just connected
    if ended == KILLED and relay.num_connected:
        announce()
    deadline = time.monotonic() + LINGER_S
    while relay.num_connected and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    server.close()


def _listen(address: str, is_reserved: bool) -> socket.socket:
    host, _, port = address.rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    return socket.create_server(target[:2], family=family, reuse_port=is_reserved)


def _exit_reason(parent: int) -> str:
    """Returns why the parent no longer needs the service, or an empty text."""
    if os.getppid() != parent:
        return KILLED
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    if not readable or sys.stdin.readline():
        return ""
    time.sleep(POLL_S)  # a dying process closes it a moment before it exits
    return "requested" if os.getppid() == parent else KILLED


def _report_exit(jaxlib: object, address: str, process: int) -> None:
    """Reports the exit of `process` in every folder of its heartbeats (faults/watchdog.py)."""
    if process < 0:  # a launcher
        return
    client = jaxlib.get_distributed_runtime_client(  # type: ignore[attr-defined]
        address, process, init_timeout=ANNOUNCE_S, shutdown_on_destruction=False, use_compression=True
    )
    client.connect()
    beat = f"/beat/{process}"
    for key, _ in client.key_value_dir_get("spmdkit"):
        if key.endswith(beat):
            report = json.dumps({"exit": None, "message": KILLED})
            try:
                client.key_value_set(f"{key.removesuffix(beat)}/exited/{process}", report)
            except RuntimeError:
                continue  # it reported its own exit


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]))
