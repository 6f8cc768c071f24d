"""The coordinator initializes the servers, starts workers, replaces failed processes, and collects the state of the
servers. It runs no computation.

A worker that dies is restarted in a new incarnation, and the other workers continue. When a server dies, all servers
restore the last checkpoint under a new generation. The state is then consistent across servers, and a push is applied
to the new state at most once.

The role is that of TensorFlow 1's chief: it initializes or restores, and saves. Workers save nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from spmdkit import errors
from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.timeouts import SERVER_POLL_S, SERVER_START_S
from spmdkit.parameter_server.completed_batches import redistribute
from spmdkit.parameter_server.partition import Arrays, joined, shard, to_arrays
from spmdkit.parameter_server.transport import Endpoint, Transport, Unavailable, WorkerExit, WorkerHandle, call
from spmdkit.step.state import TrainState

MAX_FAILURES = 3
"""After this many consecutive failures of one worker without a gradient the run ends, since the cause is permanent."""


Event = tuple[str, dict[str, Any]]


def note(event: str, **fields: Any) -> Event:
    """Returns an event and its fields for the event log."""
    return event, fields


@dataclass
class WorkerStats:
    """The status of the first server at the last poll, and the changes since the previous poll."""

    applied: int = 0  # smallest number of updates over the servers
    records: list[dict[str, Any]] = field(default_factory=list)  # applied pushes since the last poll
    histogram: dict[int, int] = field(default_factory=dict)  # staleness -> applied pushes
    dropped: dict[str, int] = field(default_factory=dict)  # outcome -> pushes
    progress: dict[int, int] = field(default_factory=dict)  # worker -> applied pushes
    events: list[Event] = field(default_factory=list)
    restored_updates: int | None = None  # number of updates of the restored checkpoint


class Coordinator:
    """The servers and workers of one run.

    Args:
        owned: path of a leaf -> its server.
        load: returns the initial (state on the host, table of each server of the saved run, or None); called again to
            restore.
        give_up: returns whether to stop waiting for an unreachable server.
        life: incarnation of the first workers, higher than all in the tables.
    """

    def __init__(
        self,
        transport: Transport,
        optimizer: Any,
        owned: Mapping[str, int],
        servers: int,
        workers: int,
        load: Callable[[], tuple[TrainState, list[dict[str, Any]] | None]],
        give_up: Callable[[], bool] = lambda: False,
        life: int = 0,
    ):
        self._transport, self._optimizer, self._owned, self._load = transport, optimizer, owned, load
        self.endpoints: list[Endpoint] = [transport.server(number) for number in range(servers)]
        self._incarnations = dict.fromkeys(range(workers), life)
        self._running: dict[int, WorkerHandle] = {}
        self._without_push = dict.fromkeys(range(workers), 0)
        self._progress_at_start = dict.fromkeys(range(workers), 0)
        self._generation, self._cursor = 0, 0
        self._away: set[int] = set()
        self._located: set[int] = set()  # workers with a reported host
        self._places: dict[int, str] = {}  # server -> its last known host
        self._progress: dict[int, int] = {}
        self._like: Any = None  # a state of the same structure
        self._give_up = give_up
        self._start_by, self._has_started = Deadline(SERVER_START_S), False

    def install(self) -> int:
        """Installs the initial state on all servers, under a new generation, and returns its number of updates."""
        state, tables = self._load()
        self._like, self._generation, self._cursor = state, self._generation + 1, 0
        num = len(self.endpoints)
        tables = [{"applied": int(state.step)}] * num if tables is None else redistribute(tables, self._owned, num)
        for number, endpoint in enumerate(self.endpoints):
            arrays = parts_of(state, self._optimizer, self._owned, number)
            self._call(endpoint, "install", self._generation, arrays, tables[number], self._incarnations)
        return int(state.step)

    def snapshot(self) -> tuple[TrainState, list[dict[str, Any]]] | None:
        """Returns (the full state on the host, the table of each server); None if a server has just died."""
        snapshots = [self._call(endpoint, "snapshot") for endpoint in self.endpoints]
        if any(part is None or part[0] != self._generation for part in snapshots):
            return None
        arrays, tables = [parts for _, parts, _ in snapshots], [table for _, _, table in snapshots]
        like = self._like
        whole: Callable[[str], Any] = lambda name: joined(getattr(like, name), [parts[name] for parts in arrays])
        state = like.replace(
            step=np.int32(min(table["applied"] for table in tables)),
            params=whole("params"),
            opt_state=whole("opt_state"),
            ema=None if like.ema is None else whole("ema"),
            model_state=None if like.model_state is None else joined(like.model_state, [arrays[0]["model_state"]]),
        )
        return state, tables

    def _call(self, endpoint: Endpoint, method: str, *args: Any) -> Any:
        return call(endpoint, method, *args, give_up=self._give_up)

    @property
    def num_workers(self) -> int:
        """The requested number of workers."""
        return len(self._incarnations)

    def start(self) -> list[Event]:
        return [self._start(number) for number in self._incarnations]

    def wait_for_workers(self, longest_s: float) -> list[int]:
        """Waits until all workers are ready to compute, so that no worker starts far ahead of another. After at most
        `longest_s`, or when a worker has exited, returns the workers that have no process yet.

        Raises: RendezvousError if a server does not start.
        """
        stop: Callable[[], bool] = lambda: self._give_up() or self._start_by.expired
        for number, endpoint in enumerate(self.endpoints):
            try:
                call(endpoint, "status", sys.maxsize, give_up=stop)
            except Unavailable as error:
                if self._give_up():
                    raise
                raise self._not_started(f"server {number} has not") from error
        for _ in Deadline(longest_s).polls(SERVER_POLL_S):
            if self._give_up():
                return []
            ready = self._call(self.endpoints[0], "status", sys.maxsize)["here"]
            if len(ready) == len(self._running) or any(running.ended() for running in self._running.values()):
                return []
        return [number for number, running in self._running.items() if not running.where]

    def why_waiting(self) -> str:
        return self._transport.why_waiting()

    def _not_started(self, which: str) -> errors.RendezvousError:
        return errors.RendezvousError(
            f"{which} started within {SERVER_START_S:.0f} s: {self.why_waiting()}. Start the same command again on "
            "machines with free processors and memory, or use sync.parameter_server.transport=threads."
        )

    def _start(self, number: int) -> Event:
        incarnation = self._incarnations[number]
        self._running[number] = self._transport.worker(number, incarnation, self.endpoints)
        self._progress_at_start[number] = self._progress.get(number, 0)
        self._located.discard(number)
        return note("worker_started", worker=number, incarnation=incarnation)

    def join(self) -> Event:
        number = len(self._incarnations)
        self._incarnations[number], self._without_push[number] = max(self._incarnations.values()), 0
        self._admit(number)
        return self._start(number)

    def _admit(self, number: int) -> None:
        """Announces a worker's new incarnation to all servers. A batch that reached only the first server is assigned
        again."""
        life = number, self._incarnations[number], len(self._incarnations)
        last, *others = [self._call(endpoint, "admit", *life) for endpoint in self.endpoints]
        if last is not None and any(other != last for other in others):
            self._call(self.endpoints[0], "reassign", last)

    def watch(self) -> WorkerStats:
        """Returns the new events, and replaces failed processes. Raises the permanent error of a worker, and
        RendezvousError if no worker starts."""
        stats = WorkerStats()
        if not self._poll_servers(stats):
            return stats
        for number, running in list(self._running.items()):
            if number not in self._located and (where := running.where):
                self._located.add(number)
                self._has_started = True
                life = self._incarnations[number]
                stats.events.append(note("worker_running", worker=number, incarnation=life, where=where))
            if (ended := running.ended()) is not None and ended.status != "done":
                self._replace(number, ended, stats)
        if not self._has_started and self._start_by.expired:
            raise self._not_started("no worker has")
        return stats

    def _poll_servers(self, stats: WorkerStats) -> bool:
        """Polls all servers, and installs the state again if one has lost it. Returns whether all have a state."""
        statuses = []
        for number, endpoint in enumerate(self.endpoints):
            try:
                statuses.append(endpoint.call_async("status", self._cursor if number == 0 else sys.maxsize)())
            except Unavailable as error:
                self._lost(number, str(error), stats)
                return False
        for number, status in enumerate(statuses):
            if (where := status.get("where", "")) and self._places.get(number) != where:
                self._places[number] = where
                stats.events.append(note("server_running", server=number, where=where))
            if not status["installed"] or status["generation"] != self._generation:
                self._lost(number, "it has restarted without a state", stats)
        if self._away:
            back = self.install()
            fields = {"step": back, "generation": self._generation}
            stats.events.append(note("servers_restored", servers=sorted(self._away), **fields))
            stats.restored_updates = back
            self._progress_at_start = dict.fromkeys(self._progress_at_start, -1)  # later updates are lost
            self._away.clear()
            return False
        first = statuses[0]
        self._cursor, self._progress = first["cursor"], first["progress"]
        stats.applied = min(status["applied"] for status in statuses)
        for name in ("records", "histogram", "dropped", "progress"):
            setattr(stats, name, first[name])
        return True

    def _lost(self, number: int, why: str, stats: WorkerStats) -> None:
        if number not in self._away:
            self._away.add(number)
            stats.events.append(note("server_lost", server=number, why=why[:300]))

    def _replace(self, number: int, ended: WorkerExit, stats: WorkerStats) -> None:
        if ended.status == "failed":
            raise getattr(errors, ended.kind, errors.UserCodeError)(ended.text)
        idle = self._progress.get(number, 0) <= self._progress_at_start[number]
        self._without_push[number] = self._without_push[number] + 1 if idle else 0
        life = self._incarnations[number]
        stats.events.append(note("worker_lost", worker=number, incarnation=life, why=ended.text[:300]))
        if self._without_push[number] >= MAX_FAILURES:
            raise errors.RendezvousError(
                f"worker {number} has died {MAX_FAILURES} times in a row before one of its gradients was "
                f"applied{': ' * bool(ended.text)}{ended.text[:500]}. The cause is permanent. Look at its output, and "
                "start the same command again to continue."
            )
        self._incarnations[number] += 1
        self._admit(number)
        stats.events.append(self._start(number))


def parts_of(state: TrainState, optimizer: Any, owned: Mapping[str, int], server: int) -> dict[str, Arrays | None]:
    """Returns a server's part of the full state, on the host."""
    whole = jax.device_get(to_arrays(state.opt_state))
    abstract = jax.eval_shape(lambda: state.params)
    opt_leaves = to_arrays(jax.eval_shape(optimizer.init, shard(abstract, owned, server)))
    of_server: Callable[[Any], dict[str, np.ndarray]] = lambda tree: {
        p: np.asarray(x) for p, x in to_arrays(tree).items() if owned[p] == server
    }
    return {
        "params": of_server(state.params),
        "opt_state": {path: np.asarray(whole[path]) for path in opt_leaves},
        "ema": None if state.ema is None else of_server(state.ema),
        "model_state": None if server or state.model_state is None else jax.device_get(to_arrays(state.model_state)),
    }
