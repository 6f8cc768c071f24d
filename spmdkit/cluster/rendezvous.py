"""The rendezvous before JAX starts: process 0 waits until every process has connected, and reports the missing ones.

`jax.distributed.initialize` aborts the process (SIGABRT) when a process is missing, without naming it. If the port is
in use, it crashes with SIGSEGV (jaxlib 0.10.2, 2026-11-20). Processes therefore first connect on the same port over
plain TCP. Each sends one line of JSON; process 0 replies to all with one line and closes the port.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import socket
import time
from typing import Any

from spmdkit.cluster.comparison import name_processes
from spmdkit.cluster.spec import ClusterSpec, split_address
from spmdkit.errors import ConfigError, RendezvousError, SpmdkitError
from spmdkit.foundation import redact
from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.timeouts import (
    FAILURE_REPORT_S,
    RENDEZVOUS_CONNECT_S,
    RENDEZVOUS_REPLY_MARGIN_S,
    RENDEZVOUS_RETRY_S,
)

MAX_LINE_BYTES = 4096
MAX_REASON = 500  # characters of a failure, of at most six bytes in JSON

_has_begun = False


def rendezvous(spec: ClusterSpec) -> str:
    """Returns the address that process 0 should bind, after all processes have connected.

    Raises:
        RendezvousError: with the missing processes or the unreachable address, after `rendezvous_timeout_s`.
        ConfigError: processes contradict each other (two with the same rank, different numbers of processes).
    """
    global _has_begun
    assert spec.coordinator is not None
    _has_begun, deadline = True, Deadline(spec.rendezvous_timeout_s)
    if spec.process_id == 0:
        return _collect(spec, deadline)
    _connect(spec, deadline)
    return spec.coordinator


def has_begun() -> bool:
    """Returns whether this process has begun a rendezvous."""
    return _has_begun


def report_failure(spec: ClusterSpec, why: str) -> None:
    """Reports to the processes that wait in the rendezvous that this one has failed before it; never raises. The others
    raise RendezvousError. Takes at most `FAILURE_REPORT_S`, for processes that arrive a little later."""
    deadline, why = Deadline(FAILURE_REPORT_S), redact.redact_text(why).partition("\n")[0][:MAX_REASON]
    with contextlib.suppress(SpmdkitError, OSError):
        if spec.process_id == 0:
            _collect(spec, deadline, _failed_before(0, why))
        else:
            _connect(spec, deadline, why)


def _failed_before(process: int, why: str) -> str:
    return f"process {process} failed before it joined: {why} Correct that, and start all processes again."


def is_loopback(host: str) -> bool:
    """Returns whether `host` refers only to this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _collect(spec: ClusterSpec, deadline: Deadline, failure: str = "") -> str:
    """Returns the bound address after all have connected. `failure`: that this process cannot join, for the others."""
    assert spec.coordinator is not None
    listener, bound = _listen(spec)
    present: dict[int, socket.socket] = {}
    error: str | None = None
    try:
        with listener, contextlib.suppress(TimeoutError):
            while error is None and len(present) < spec.num_processes - 1 and not deadline.expired:
                listener.settimeout(deadline.remaining_s)
                found, is_failure = _register(listener.accept()[0], spec, present)
                if is_failure:  # the others may connect a little later
                    failure, deadline = failure or found, Deadline(min(deadline.remaining_s, FAILURE_REPORT_S))
                else:
                    error = found or None
        missing = [p for p in range(1, spec.num_processes) if p not in present or _has_closed(present[p])]
        kind = "config" if error else "rendezvous"
        if error is None and failure:
            error = failure
        elif error is None and missing:
            came = spec.num_processes - len(missing)
            error = (
                f"expected {spec.num_processes} processes at {spec.coordinator}, {came} connected within "
                f"{spec.rendezvous_timeout_s:g} s; missing: {name_processes(missing)}. All processes must start within "
                f"the timeout. Check why the missing ones did not start, or raise SPMDKIT_RENDEZVOUS_TIMEOUT_S."
                f"{_hint(spec)}"
            )
        reply = json.dumps({"spmdkit": 1, "error": error, "kind": kind}).encode() + b"\n"
        for connection in present.values():
            with contextlib.suppress(OSError):  # it has exited; JAX's own timeout detects that
                connection.sendall(reply)
    finally:
        for connection in present.values():
            connection.close()
    if error is not None:
        raise ConfigError(error) if kind == "config" else RendezvousError(error)
    return bound


def _listen(spec: ClusterSpec) -> tuple[socket.socket, str]:
    """Returns a listening socket and the address bound: the coordinator's, or all addresses if that is not local (NAT).

    A launcher that runs the service reserves the port for this user (`reserve_port`), so the port is shared with it.
    """
    assert spec.coordinator is not None
    coordinator, is_reserved = spec.coordinator, spec.service is not None
    host, port = split_address(coordinator)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        try:
            return socket.create_server(address[:2], family=family, reuse_port=is_reserved), coordinator
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or is_loopback(host):
                raise
        return socket.create_server(("", port)), f"0.0.0.0:{port}"
    except OSError as error:
        raise RendezvousError(
            f"process 0 cannot listen at {coordinator}: {error.strerror or error}. It needs a free port of its "
            "machine. End the process that uses the port, or choose another port in SPMDKIT_COORDINATOR of all "
            f"processes.{_hint(spec)}"
        ) from None


def _hint(spec: ClusterSpec) -> str:
    return "".join(
        f" {text}" for text in (spec.found_by and f"The address is from {spec.found_by}.", spec.repair) if text
    )


def _register(connection: socket.socket, spec: ClusterSpec, present: dict[int, socket.socket]) -> tuple[str, bool]:
    """Adds a process to `present`; returns a conflict, or its failure and True, or an empty text. Connections with
    another protocol are closed."""
    hello = _receive(connection, timeout_s=1.0)
    process, count, failure = hello.get("process"), hello.get("num_processes"), hello.get("failure")
    if not isinstance(process, int) or not isinstance(count, int):
        connection.close()
        return "", False
    error, is_failure = "", False
    if count != spec.num_processes:
        error = (
            f"process {process} was started with {spec.names.num_processes}={count}, process 0 with "
            f"{spec.num_processes}. The number must be the same in all processes. Start all of them with one number."
        )
    elif not 0 < process < count or (process in present and not _has_closed(present[process])):
        error = (
            f"two processes were started with {spec.names.process_id}={process}. Each rank from 0 to "
            f"{spec.num_processes - 1} is used once. End the processes of an earlier run, or use another port."
        )
        process = -1  # the first connection remains, and this one receives the error too
    elif isinstance(failure, str):
        error, is_failure = _failed_before(process, failure), True
    if process in present:
        present[process].close()
    present[process] = connection
    return error, is_failure


def _connect(spec: ClusterSpec, deadline: Deadline, own_failure: str = "") -> None:
    assert spec.coordinator is not None
    host, port = split_address(spec.coordinator)
    greeting = {"spmdkit": 1, "process": spec.process_id, "num_processes": spec.num_processes}
    hello = json.dumps(greeting | ({"failure": own_failure} if own_failure else {})).encode() + b"\n"
    failure = "no attempt was made"
    reply: dict[str, Any] = {}
    while "error" not in reply:
        if deadline.expired:
            raise RendezvousError(
                f"process {spec.process_id} could not reach process 0 at {spec.coordinator} within "
                f"{spec.rendezvous_timeout_s:g} s ({failure}); missing: process 0. It must run, and its port must "
                f"be reachable from this host. Check why process 0 did not start, or correct SPMDKIT_COORDINATOR."
                f"{_hint(spec)}"
            )
        try:
            timeout_s = min(deadline.remaining_s, RENDEZVOUS_CONNECT_S)
            with socket.create_connection((host, port), timeout_s) as connection:
                connection.sendall(hello)
                reply = _receive(connection, timeout_s=deadline.remaining_s + RENDEZVOUS_REPLY_MARGIN_S)
                failure = "it closed the connection without a reply"
        except OSError as error:
            failure = error.strerror or str(error)
        if "error" not in reply:
            time.sleep(min(RENDEZVOUS_RETRY_S, deadline.remaining_s))
    if reply["error"] is not None:
        raise ConfigError(reply["error"]) if reply.get("kind") == "config" else RendezvousError(reply["error"])
    _wait_for_service(*(split_address(spec.service) if spec.service else (host, port)), deadline)


def wait_for_service(spec: ClusterSpec, timeout_s: float) -> str:
    """Returns the address of the launcher's service when it accepts connections. All processes are ready then."""
    assert spec.service is not None
    _wait_for_service(*split_address(spec.service), Deadline(timeout_s))
    return spec.service


def _wait_for_service(host: str, port: int, deadline: Deadline) -> None:
    """Waits until JAX's service accepts; otherwise gRPC finds the port closed and backs off for a second."""
    for _ in deadline.polls(0.01):
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=1.0).close()
            return


def _receive(connection: socket.socket, timeout_s: float) -> dict[str, Any]:
    """Returns one line of JSON from the peer; an empty dict for anything else."""
    deadline, data = Deadline(timeout_s), b""
    try:
        while not data.endswith(b"\n") and len(data) < MAX_LINE_BYTES:
            connection.settimeout(deadline.remaining_s)
            part = connection.recv(MAX_LINE_BYTES)
            if not part:
                break
            data += part
        message = json.loads(data)
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) and message.get("spmdkit") == 1 else {}


def _has_closed(connection: socket.socket) -> bool:
    """Returns whether the peer has closed: it sends nothing after its line, so readable means closed."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.setblocking(True)
