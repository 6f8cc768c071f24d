"""Checks between hosts for network problems that would make a collective hang.

Each process listens on the address that Gloo would advertise, and every other process connects to it, as collectives
do. The reply contains the time of the host, which gives the difference of the two clocks (Cristian, 1989).
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from spmdkit.checkpoint import Remote, prepare_run_dir
from spmdkit.checkpoint.location import Location
from spmdkit.cluster import Cluster
from spmdkit.errors import ConfigError, UnreachableError
from spmdkit.foundation.timeouts import HOST_CHECK_S, HOST_CONNECT_S
from spmdkit.metrics.environment import package_versions

REQUESTS = 3  # to each clock; the fastest reply is used


def probe_hosts(cluster: Cluster, address: str | None = None) -> list[dict[str, Any]]:
    """Returns per process: host, address, unreached (process -> error) and clock_s (seconds that its clock is ahead of
    the clock of process 0)."""
    mine: dict[str, Any] = {"host": socket.gethostname(), "address": address or cluster.advertises}
    mine |= {"unreached": {}, "clock_s": 0.0 if cluster.is_main else None}
    if cluster.num_processes == 1:
        return [mine]
    with _clock_server(mine["address"]) as port:
        places = cluster.gather("doctor address", [mine["address"], port], HOST_CHECK_S)
        for process, (other, its_port) in enumerate(places):
            if process == cluster.process_index:
                continue
            try:
                ahead = [_read_clock(other, its_port) for _ in range(REQUESTS)]
            except (OSError, ValueError) as error:
                mine["unreached"][str(process)] = str(error) or type(error).__name__
                continue
            if process == 0:
                mine["clock_s"] = -min(ahead)[1]
        return cluster.gather("doctor hosts", mine, HOST_CHECK_S)


@contextlib.contextmanager
def _clock_server(address: str) -> Any:
    """Yields the port on which this process serves its time; 0 if it cannot listen."""
    try:
        server = socket.create_server((address, 0))
    except OSError:  # the name resolves to an address of another host
        yield 0
        return

    def respond() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(repr(time.time()).encode())

    threading.Thread(target=respond, name="doctor", daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()


def _read_clock(address: str, port: int) -> tuple[float, float]:
    """Returns (seconds of the round trip, seconds that the other clock is ahead)."""
    if not port:
        raise OSError("it cannot listen there: the address belongs to another host")
    begun, sent = time.perf_counter(), time.time()
    with socket.create_connection((address, port), HOST_CONNECT_S) as connection:
        connection.settimeout(HOST_CONNECT_S)
        gathered = float(connection.recv(64))
    took = time.perf_counter() - begun
    return took, gathered - (sent + took / 2)


def same_versions(cluster: Cluster) -> tuple[dict[str, str], list[str]]:
    """Returns (the versions of this process, the processes with different versions)."""
    mine = {"python": platform.python_version()} | {name: x for name, x in package_versions().items() if x}
    gathered = cluster.gather("doctor versions", mine, HOST_CHECK_S)
    wrong = [
        f"process {process} has {name} {theirs.get(name, 'not at all')}, process 0 "
        f"{gathered[0].get(name, 'not at all')}"
        for process, theirs in enumerate(gathered)
        for name in sorted(set(gathered[0]) | set(theirs))
        if theirs.get(name) != gathered[0].get(name)
    ]
    return mine, wrong


def write_test(cluster: Cluster, run_dir: Path, checkpoints: Location) -> tuple[str, list[str]]:
    """Returns (messages about the run directory and the checkpoints, problems): every process writes a file, and all
    processes look for it."""
    name = f".doctor-{cluster.process_index}-{secrets.token_hex(4)}"
    mine, path = {"file": name, "error": ""}, run_dir / name
    remote = checkpoints / name if isinstance(checkpoints, Remote) else None
    try:
        prepare_run_dir(run_dir)
        path.write_bytes(b"spmdkit")
        if remote is not None:
            remote.write_bytes(b"spmdkit")
            assert remote.read_bytes() == b"spmdkit"
    except (ConfigError, UnreachableError, OSError) as error:
        mine["error"] = str(error)
    try:
        gathered = cluster.gather("doctor files", mine, HOST_CHECK_S)
        seen = [process for process, one in enumerate(gathered) if os.path.exists(run_dir / one["file"])]
        views = cluster.gather("doctor views", seen, HOST_CHECK_S)
    finally:
        with contextlib.suppress(OSError, UnreachableError):
            path.unlink(missing_ok=True)
            if remote is not None:
                remote.parent.remove([name])
    wrong = [f"process {process} cannot write: {one['error']}" for process, one in enumerate(gathered) if one["error"]]
    shared = all(view == list(range(cluster.num_processes)) for view in views)
    if not shared and not wrong and not isinstance(checkpoints, Remote):
        wrong.append(
            f"{run_dir} is not one folder for all processes: they do not see each other's files. Set run_dir to a "
            "folder of a shared disk, or checkpoint.directory to a bucket"
        )
    where = f"{run_dir}" + (f", checkpoints in {checkpoints}" if isinstance(checkpoints, Remote) else "")
    return f"{'cannot be used' if wrong else 'written by all'}: {where}", wrong
