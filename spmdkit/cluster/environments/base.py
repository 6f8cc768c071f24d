"""What an environment is: how one kind of starter tells a process its place. A file each in this folder, found by its
name.

An environment is a module with

    NAMES: Names           its variables, for messages
    read(env) -> Answer    `DetectedCluster`, `Partial`, or None where nothing of it is set

`read` is pure: it looks at the mapping that it is given and at nothing else. Environments are nested (`mpirun` inside
`salloc`, `spmdkit launch` in a batch script), so several environments may answer; `detection.py` chooses by `level`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from spmdkit.cluster.spec import ClusterSpec, Names, Role, split_address
from spmdkit.errors import ConfigError

Level = Literal["asked", "starter", "allocation"]

LEVELS: tuple[Level, ...] = ("asked", "starter", "allocation")
"""Highest first. asked: set for spmdkit by name. starter: set for each process by what started it (torchrun, mpirun, a
Slurm step).
allocation: set for each host by what lent it (a Slurm job without a step, JobSet, Kubeflow)."""

FIRST_PORT, NUM_PORTS = 61440, 4096
"""Where ports are derived from a number that all processes know: above the ports that Linux gives out by itself
(32768-60999)."""


@dataclass(frozen=True)
class DetectedCluster:
    """This process's place, complete.

    Attributes:
        names: the environment's own variables, for messages.
        agents: how many processes the starter keeps of its own to start these, one a host (torchrun's agents, Open
            MPI's daemons). Another starter with that many processes has started the agents, and is below this one.
        said: the place in the environment's own words, where its variables do not hold the two numbers themselves.
        repair: what to look at in this environment when processes do not meet, a sentence.
        role: what the process is for: `train`, or `evaluator`, alone beside those that train.
    """

    spec: ClusterSpec
    level: Level
    names: Names
    agents: int | None = None
    said: str = ""
    repair: str = ""
    role: Role = "train"


@dataclass(frozen=True)
class Partial:
    """Something of the environment is set, and it is no place in a cluster.

    Of the levels asked and starter it is an error where nothing else is found; of the level allocation it is one
    process and a line in the log.

    Attributes:
        why: what is set and what is missing, a sentence without its full stop.
        repair: the smallest change that makes it a cluster, a sentence.
        num_processes: how many processes it speaks of, where it says so.
    """

    why: str
    repair: str
    level: Level
    num_processes: int | None = None


Answer: TypeAlias = DetectedCluster | Partial | None


class Environment(Protocol):
    """The module of an environment."""

    NAMES: Names

    def read(self, env: Mapping[str, str]) -> Answer:
        """Returns what `env` says in this environment."""


def whole_number(env: Mapping[str, str], name: str) -> int | None:
    """Returns the value of a variable that holds a whole number; None where it is not set or holds something else."""
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def port_of(number: int) -> int:
    """Returns a port for a number that all processes know."""
    return FIRST_PORT + number % NUM_PORTS


def is_address(text: str) -> bool:
    """Returns whether `text` is `host:port` or `[ipv6]:port`."""
    try:
        split_address(text)
    except ConfigError:
        return False
    return True


def address(host: str, port: int) -> str:
    """Returns `host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
