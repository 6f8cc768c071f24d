"""JAX's coordination service in a process of its own, so that no process of the job is special: run by its path, by
`process.py` and by nothing else.

    python -I -S service.py SITE NUM_PROCESSES HEARTBEAT_S SHUTDOWN_S PROCESS

It imports jaxlib and the standard library alone (0.15 s of a core). A line on standard input is the address to listen
at; it answers `up`. From then on it lives until its standard input closes or the process that started it is gone, and
then as long as anybody is connected, a minute at most: who lost its service would be ended by JAX with SIGABRT. PROCESS
is the number of the process that started it, for which it then says in the store that it is gone; -1: a launcher.

Recoverable (jaxlib 0.10.2 to 0.12): the service compares heartbeats by wall time before 0.12, unsigned, so that a clock
that is set back makes all of them look lost.
That is then an entry in its own books, and not the end of everybody; who is lost says the watchdog
(faults/watchdog.py).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out
from grpc_relay import Relay  # type: ignore[import-not-found]

POLL_S = 0.05
LINGER_S = 60.0
"""How long at most it stays for those who are still connected."""
ANNOUNCE_S = 5
IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Slurm's notice and `scancel`, and whoever signals a group, reach every process of a job, this one too; the others
need it to save and leave with 42."""
GONE = "it ended without a word: killed, out of memory, or os._exit"


def main(site: str, num_processes: int, heartbeat_s: int, shutdown_s: int, process: int) -> None:
    """Serves until nobody needs it."""
    parent = os.getppid()
    for name in IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    sys.path.append(site)
    import jaxlib._jax as jaxlib

    address = sys.stdin.readline().strip()
    if not address:
        return
    listener = _listen(address, is_kept=process < 0)
    with socket.socket() as holder:  # keeps the port of the service itself free until gRPC shares it
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        inner = holder.getsockname()
        service = jaxlib.get_distributed_runtime_service(  # type: ignore[attr-defined]
            f"127.0.0.1:{inner[1]}",
            num_processes,
            heartbeat_timeout=heartbeat_s,
            shutdown_timeout=shutdown_s,
            recoverable=True,
        )
    relay = Relay(listener, inner)
    print("up", flush=True)
    while not (ended := _ended(parent)):
        relay.turn(POLL_S)
    relay.turn(0)  # who has just come is there too
    if ended == GONE and process >= 0 and relay.num_connected:
        _announce(jaxlib, f"127.0.0.1:{inner[1]}", process)
    deadline = time.monotonic() + LINGER_S
    while relay.num_connected and time.monotonic() < deadline:
        relay.turn(POLL_S)
    del service
    os._exit(0)


def _listen(address: str, is_kept: bool) -> socket.socket:
    """Returns a listening socket; is_kept: a launcher keeps the port free, so that it has to be shared with the
    launcher."""
    host, _, port = address.rpartition(":")
    family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(place[:2], family=family, reuse_port=is_kept, backlog=1024)
    listener.setblocking(False)
    return listener


def _ended(parent: int) -> str:
    """Returns why there is nobody any more to serve for, or an empty string."""
    if os.getppid() != parent:
        return GONE
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    if not readable or sys.stdin.readline():
        return ""
    time.sleep(POLL_S)  # a process that dies closes it a moment before it is gone
    return "asked" if os.getppid() == parent else GONE


def _announce(jaxlib: object, address: str, process: int) -> None:
    """Says in the place of `process`, which can say nothing any more, that it is gone: wherever it beat
    (faults/watchdog.py)."""
    client = jaxlib.get_distributed_runtime_client(  # type: ignore[attr-defined]
        address, process, init_timeout=ANNOUNCE_S, shutdown_on_destruction=False, use_compression=True
    )
    client.connect()
    beat = f"/beat/{process}"
    for key, _ in client.key_value_dir_get("spmdkit"):
        if key.endswith(beat):
            said = json.dumps({"exit": None, "said": GONE})
            try:
                client.key_value_set(f"{key.removesuffix(beat)}/left/{process}", said)
            except RuntimeError:
                continue  # it had said itself why it leaves


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]))
