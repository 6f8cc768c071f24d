"""`ClusterSpec`: the rank of one process and the size of its cluster, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from spmdkit.errors import ConfigError
from spmdkit.foundation.constants import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from spmdkit.foundation.timeouts import RENDEZVOUS_S


class Names(NamedTuple):
    """The environment variables from which the cluster was read, for messages."""

    num_processes: str
    process_id: str
    coordinator: str


OURS = Names(NUM_PROCESSES, PROCESS_ID, COORDINATOR)


Role: TypeAlias = Literal["train", "evaluator"]


@dataclass(frozen=True)
class ClusterSpec:
    """The rank of one process, and how it joins the other processes."""

    coordinator: str | None = None  # `host:port` of process 0; None for a single process
    num_processes: int = 1
    process_id: int = 0
    devices_per_process: int | None = None
    rendezvous_timeout_s: float = RENDEZVOUS_S
    names: Names = OURS  # the variables from which this was read
    notes: tuple[str, ...] = ()  # log lines about how it was read; process 0 prints them once
    service: str | None = None  # `host:port` of JAX's coordination service if a launcher runs it
    found_by: str = field(default="", compare=False)  # the environment and its variables, for the log
    repair: str = field(default="", compare=False)  # what to check in it when processes do not connect
    role: Role = "train"  # an evaluator is a single process


def split_address(address: str, name: str = OURS.coordinator) -> tuple[str, int]:
    """Returns (host, port) of `host:port` or `[ipv6]:port`, which the variable `name` holds."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{name}={address!r} is not an address. It is host:port of process 0 with a port from 1 to 65535, "
            f"for example 10.0.0.1:8476."
        )
    return host, int(port)
