"""The interface of an environment: how one kind of starter assigns a rank to a process. One file per environment.

An environment is a module with

    NAMES: Names              its variables, for messages
    read(env) -> Detection    `DetectedCluster`, `Partial`, or None if none of its variables is set

`read` is pure. Environments can be nested (`mpirun` inside `salloc`, `spmdkit launch` in a batch script), so several
may be detected; `detection.py` selects one by `level`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from spmdkit.cluster.spec import ClusterSpec, Names, Role, split_address
from spmdkit.errors import ConfigError

Level = Literal["explicit", "starter", "allocation"]

LEVELS: tuple[Level, ...] = ("explicit", "starter", "allocation")
"""Highest first. explicit: set for spmdkit. starter: set for each process by the program that started it (torchrun,
mpirun, a Slurm step). allocation: set for each host by the system that allocated it (a Slurm job without a step,
JobSet, Kubeflow)."""

FIRST_PORT, NUM_PORTS = 61440, 4096
"""The range of ports derived from a number that all processes know: above Linux's ephemeral ports (32768-60999)."""


@dataclass(frozen=True)
class DetectedCluster:
    """A complete cluster: its size, the rank of this process, and the address of process 0."""

    spec: ClusterSpec
    level: Level
    agents: int | None = None  # processes of the starter, one per host; a detection of this many processes is not used
    description: str = ""  # for variables that do not hold the size and the rank as numbers
    repair: str = ""  # what to check in this environment when processes do not connect, a sentence
    role: Role = "train"


@dataclass(frozen=True)
class Partial:
    """Variables of the environment are set but do not give a rank. An error at the levels explicit and starter if
    nothing else is detected, otherwise one process and a line in the log."""

    why: str  # the variables set and missing, a sentence without its full stop
    repair: str  # the smallest change that makes it a cluster, a sentence
    level: Level
    num_processes: int | None = None


Detection: TypeAlias = DetectedCluster | Partial | None


class Environment(Protocol):
    """The module of an environment."""

    NAMES: Names

    def read(self, env: Mapping[str, str]) -> Detection:
        """Returns the cluster that this environment's variables in `env` describe, if any."""


def whole_number(env: Mapping[str, str], name: str) -> int | None:
    """Returns the value of a variable that holds an integer, None otherwise."""
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def shown(env: Mapping[str, str], *names: str) -> str:
    """Returns `A='1', B=''`, for a message."""
    return ", ".join(f"{name}={env.get(name, '')!r}" for name in names)


def port_of(number: int) -> int:
    return FIRST_PORT + number % NUM_PORTS


def is_address(text: str) -> bool:
    try:
        split_address(text)
    except ConfigError:
        return False
    return True


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
