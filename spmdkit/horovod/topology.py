"""The ranks of the job: `init`, `rank`, `size`, also within a host (`local_`) and across hosts (`cross_`). One process
is one rank.

Source: horovod/common/basics.py (Horovod 0.28.1).
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdkit.cluster import Cluster, detect_cluster, join
from spmdkit.horovod.negotiation import Blackboard, StallTimeouts
from spmdkit.horovod.process_sets import ProcessSet, global_process_set

_init_count = itertools.count()


@dataclass
class World:
    """The state of one `init`, until `shutdown`."""

    cluster: Cluster
    board: Blackboard
    hosts: list[str]  # of each rank
    sets: dict[int, ProcessSet] = field(default_factory=dict)  # by id; 0 is the global one
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))


_world: World | None = None


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | None = None) -> None:
    """Joins the processes of the job, started by `spmdkit launch`, Slurm, torchrun or any environment of
    `spmdkit.cluster`. A second call has no effect.

    Args:
        comm: the ranks of the job; must be all ranks, since JAX's devices are those of all processes.
        process_sets: subsets of ranks, the same list on every rank.
    """
    global _world
    if _world is not None:
        return
    timeouts = StallTimeouts.of(os.environ)
    cluster = join(detect_cluster(os.environ), "auto", collective_timeout_s=timeouts.shutdown_s)
    if comm is not None and sorted(comm) != list(range(cluster.num_processes)):
        raise ValueError(
            f"hvd.init(comm={list(comm)}) in {cluster.num_processes} processes: JAX's devices are those of all "
            "processes that were started, so all are ranks. Start as many processes as there should be ranks, or use "
            "process sets for some of them."
        )
    store, folder = cluster.board("horovod")
    board = Blackboard(store, f"{folder}/{next(_init_count)}", cluster.process_index, timeouts)
    hosts = cluster.gather("hosts", os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname(), timeouts.shutdown_s)
    _world = World(cluster, board, hosts)
    global_process_set.open(0, list(range(cluster.num_processes)), board)
    _world.sets[0] = global_process_set
    for process_set in process_sets or ():
        register(process_set)
    _exit_together()
    if cluster.is_main:
        for note in cluster.notes:
            print(note, file=sys.stderr)


def shutdown() -> None:
    """Ends the session of `init`; `init` may follow. Pending operations are dropped; arrays stay valid."""
    global _world
    for process_set in _world.sets.values() if _world is not None else ():
        process_set.close()
    _world = None


def world() -> World:
    """Returns the state of `init`. Raises ValueError before it, as Horovod does."""
    if _world is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _world


def register(process_set: ProcessSet) -> ProcessSet:
    """Opens a process set. Raises ValueError for unknown ranks, and for a duplicate set."""
    state, ranks = world(), process_set.ranks
    size_of_world = state.cluster.num_processes
    if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0 or max(ranks) >= size_of_world:
        raise ValueError(
            f"process set {ranks}: a set has different ranks from 0 to {size_of_world - 1}, and at least one. Found "
            f"{size_of_world} process(es)."
        )
    for other in state.sets.values():
        if other.ranks == ranks:
            raise ValueError(f"Attempted to add a duplicate process set: {process_set}; it is {other}.")
    number = next(state.ids)
    process_set.open(number, list(ranks), state.board)
    state.sets[number] = process_set
    return process_set


def is_initialized() -> bool:
    """Returns whether `init` was called and `shutdown` was not."""
    return _world is not None


def size() -> int:
    """Returns the number of ranks."""
    return world().cluster.num_processes


def rank() -> int:
    """Returns the index of this process, from 0."""
    return world().cluster.process_index


def local_rank() -> int:
    """Returns the index of this process among the processes of its host."""
    return place(world().hosts, rank())["local_rank"]


def local_size() -> int:
    """Returns the number of processes of this host."""
    return place(world().hosts, rank())["local_size"]


def cross_rank() -> int:
    """Returns the index of this host among the hosts that have a process with this local rank."""
    return place(world().hosts, rank())["cross_rank"]


def cross_size() -> int:
    """Returns the number of hosts that have a process with this local rank."""
    return place(world().hosts, rank())["cross_size"]


def is_homogeneous() -> bool:
    """Returns whether every host has the same number of processes."""
    hosts = world().hosts
    return len({hosts.count(host) for host in hosts}) == 1


def place(hosts: Sequence[str], rank: int) -> dict[str, int]:
    """Returns the local and cross rank and size of a rank, from the host of each rank."""
    local = [hosts[:r].count(hosts[r]) for r in range(len(hosts))]
    across = [r for r in range(len(hosts)) if local[r] == local[rank]]
    return {
        "local_rank": local[rank],
        "local_size": hosts.count(hosts[rank]),
        "cross_rank": across.index(rank),
        "cross_size": len(across),
    }


@functools.cache
def _exit_together() -> None:
    """Waits for all ranks at interpreter exit. After an exception, reports it to the other ranks and does not wait."""
    cluster, before = world().cluster, sys.excepthook
    if cluster.num_processes == 1:
        return
    failed: list[BaseException] = []

    def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        failed.append(error)
        if _world is not None:
            _world.board.report_failure(f"{kind.__name__}: {error}")

    def leave() -> None:
        try:
            if not failed:
                cluster.shutdown()
        except Exception as error:  # noqa: BLE001  the process is exiting
            print(f"rank {cluster.process_index}: {error}", file=sys.stderr)
            failed.append(error)
        if failed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # JAX would wait 100 s for the other processes, and then abort

    sys.excepthook = excepthook
    atexit.register(leave)
