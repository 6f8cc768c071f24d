"""The negotiation between all ranks of a process set before data is sent. A mismatch raises on every rank instead of a
hang.

A rank takes part in a *round* when it waits for a result. Each rank publishes its pending requests, the first rank of
the set publishes the table of all requests, and each rank computes the same decision from it (`decide`):

- an operation that all ranks request (except those that have joined) runs, in the order of the lowest rank's list;
- an operation that ranks describe differently (shape, dtype, root, scale, *operation*) is an error on each of them;
- a round without an operation that can run is an error on each of them. Horovod hangs in this case.

Messages use JAX's coordination service (two short requests per round, 1 to 3 ms on loopback), because a collective has
no timeout and does not name the missing rank. Rounds of different sets are independent. Source:
horovod/common/controller.cc (ComputeResponseList, ConstructResponse), stall_inspector.cc.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmdkit.cluster.comparison import name_processes
from spmdkit.cluster.store import Store
from spmdkit.errors import ExitCode, RendezvousError
from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.timeouts import NEGOTIATION_POLL_S

JOIN = "join"
_PLAIN = ("root", "prescale", "postscale", "leaves", "dtypes", "shapes", "rest", "ranks")
COMPARED = {"op": "operation", "reduce": "reduction"} | {name: name for name in _PLAIN}
COMPARED |= {"leaves": "names of leaves", "rest": "dims after the first"}
"""Field that must be equal on all ranks -> its description, in the order in which differences are reported."""

SUPPORTED_AFTER_JOIN = ("Sum", "Average", "Adasum")


class HorovodInternalError(RuntimeError):
    """An operation failed on every participating rank: requests differ, or a rank exited or is missing."""

    exit_code = ExitCode.PEER_LOST


class StallTimeouts(NamedTuple):
    """Time limits for waiting for other ranks, in seconds."""

    warn_s: float = 60.0
    shutdown_s: float = 600.0

    @classmethod
    def of(cls, env: Mapping[str, str]) -> StallTimeouts:
        """Returns the limits from Horovod's environment variables. No limit (0, the default) is ten minutes here."""
        names = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
        return cls(*(float(env.get(name) or 0) or default for name, default in zip(names, cls(), strict=True)))


@dataclass(frozen=True)
class Blackboard:
    """The requests of one `init` in the coordination service's key-value store."""

    store: Store
    folder: str
    rank: int
    timeouts: StallTimeouts

    def report_failure(self, why: str) -> None:
        """Reports to all ranks that this one is about to exit, and why."""
        try:
            self.store.put(f"{self.folder}/failed/{self.rank}", why, overwrite=True)
        except RendezvousError:
            return  # the service has exited

    def failures(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns rank -> reason for the ranks that have reported their exit."""
        reported = self.store.entries(f"{self.folder}/failed").items()
        return {int(rank): why for rank, why in reported if int(rank) in ranks}


class Rounds:
    """The rounds of the process set `number`. The n-th call of `exchange` is the same round on each of its ranks."""

    def __init__(self, board: Blackboard, number: int, ranks: Sequence[int]):
        self._board, self._ranks = board, list(ranks)
        self._folder, self._round = f"{board.folder}/{number}", 0

    def exchange(self, requests: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
        """Returns rank -> its requests, the same table on every rank of the set. Raises HorovodInternalError on each
        rank if a rank is late or has failed, or if the service has exited."""
        if len(self._ranks) == 1:
            return {self._board.rank: requests}
        folder, self._round = f"{self._folder}/{self._round}", self._round + 1
        try:
            if self._board.rank == self._ranks[0]:
                reply = self._collect(folder, requests)
            else:
                self._board.store.put(f"{folder}/{self._board.rank}", json.dumps(requests))
                reply = self._wait(f"{folder}/all", self._ranks[:1], requests, self._board.timeouts.shutdown_s + 30)
        except RendezvousError as error:
            raise HorovodInternalError(str(error)) from error
        response = json.loads(reply)
        if "error" in response:
            raise HorovodInternalError(response["error"])
        return {int(rank): rows for rank, rows in response["requests"].items()}

    def _collect(self, folder: str, requests: list[dict[str, Any]]) -> str:
        """On the first rank: waits for the requests of all ranks, publishes them, and removes the previous round, which
        all ranks have read."""
        rows, deadline = {self._ranks[0]: requests}, Deadline(self._board.timeouts.shutdown_s)
        try:
            for rank in self._ranks[1:]:
                rows[rank] = json.loads(self._wait(f"{folder}/{rank}", [rank], requests, deadline.remaining_s))
        except HorovodInternalError as error:
            reply = json.dumps({"error": str(error)})
        else:
            reply = json.dumps({"requests": rows})
            if self._round > 1:
                self._board.store.remove(f"{self._folder}/{self._round - 2}")
        self._board.store.put(f"{folder}/all", reply)
        return reply

    def _wait(self, key: str, missing: list[int], requests: list[dict[str, Any]], timeout_s: float) -> str:
        """Returns the value of `key`. Raises HorovodInternalError if a rank reports a failure, or after `timeout_s`."""
        begin, warned, waited = time.monotonic(), False, 0.0
        who = f"rank {self._board.rank} waits in {describe(requests)}"
        while True:
            try:
                return self._board.store.get(key, max(0.001, min(NEGOTIATION_POLL_S, timeout_s - waited)))
            except TimeoutError:
                waited = time.monotonic() - begin
            for rank, why in sorted(self._board.failures(self._ranks).items()):
                raise HorovodInternalError(
                    f"rank {rank} ended ({why}) while {who}. See its output, and restart all ranks."
                )
            if waited >= timeout_s:
                raise HorovodInternalError(
                    f"{who}; {name_processes(missing).replace('process', 'rank')} did not call it within "
                    f"{timeout_s:.0f} s. Every rank of a process set makes the same calls. Look at the missing rank, "
                    "or raise HOROVOD_STALL_SHUTDOWN_TIME_SECONDS."
                )
            if waited >= self._board.timeouts.warn_s and not warned:
                warned = True
                print(f"{who} since {waited:.0f} s: rank(s) {missing} have not called it", file=sys.stderr, flush=True)


class Decision(NamedTuple):
    """The outcome of a round: the operations to run in order, each with the request of each rank (None if it has
    joined); name -> reason of a failed operation; the ranks that have joined; the reason of a deadlock, or None."""

    run: list[tuple[str, dict[int, dict[str, Any] | None]]]
    errors: dict[str, str]
    joined: list[int]
    deadlock: str | None


def decide(requests: Mapping[int, Sequence[Mapping[str, Any]]]) -> Decision:
    """Returns the outcome for the requests of each rank. Pure, so that all ranks make the same decision."""
    table = {rank: {request["name"]: dict(request) for request in rows} for rank, rows in requests.items()}
    joined = [rank for rank, rows in table.items() if JOIN in rows]
    names = dict.fromkeys(request["name"] for rows in requests.values() for request in rows if request["name"] != JOIN)
    run: list[tuple[str, dict[int, dict[str, Any] | None]]] = []
    errors: dict[str, str] = {}
    for name in names:
        by_rank = {rank: table[rank].get(name) for rank in table}
        if any(request is None and rank not in joined for rank, request in by_rank.items()):
            continue  # a rank has not requested it yet
        why = disagreement(name, by_rank)
        if why is None:
            run.append((name, by_rank))
        else:
            errors[name] = why
    deadlock = None
    if not run and not errors and len(joined) < len(table):
        rows = "; ".join(f"rank {rank}: {describe(list(rows.values()))}" for rank, rows in table.items())
        deadlock = (
            f"the ranks wait for different operations, and would indefinitely: {rows}. Every rank of a process "
            "set makes the same calls, with the same names. Make the missing call on all ranks."
        )
    return Decision(run, errors, joined, deadlock)


def disagreement(name: str, by_rank: Mapping[int, dict[str, Any] | None]) -> str | None:
    """Returns why an operation cannot run, with the request of each rank, or None if it can."""
    present = {rank: request for rank, request in by_rank.items() if request is not None}
    faults = {rank: request["fault"] for rank, request in present.items() if "fault" in request}
    if faults:
        return f"{name}: " + "; ".join(f"rank {rank}: {fault}" for rank, fault in faults.items())
    for key in COMPARED:
        if len({json.dumps(request.get(key)) for request in present.values()}) > 1:
            descriptions = (
                f"rank {rank}: {describe([request])}{_own_leaves(rank, present)}" for rank, request in present.items()
            )
            return f"mismatched {COMPARED[key]}: {'; '.join(descriptions)}. All ranks must pass the same."
    first = next(iter(present.values()))
    offered = first["op"] == "allreduce" and first["reduce"] in SUPPORTED_AFTER_JOIN
    if len(present) < len(by_rank) and not offered:
        absent = [rank for rank, request in by_rank.items() if request is None]
        what = first["op"] if first.get("reduce") is None else f"{first['op']} with {first['reduce']}"
        return (
            f"{what} is not supported while ranks have joined, found {absent}: they contribute zeros only. Only "
            f"allreduce with {', '.join(SUPPORTED_AFTER_JOIN)} is. Make the call before the first rank joins."
        )
    return None


def _own_leaves(rank: int, present: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns as text the names of leaves that this rank has and some other rank does not."""
    of_ranks = [set(request.get("leaves") or ()) for request in present.values()]
    extra = [name for name in present[rank].get("leaves") or () if any(name not in names for names in of_ranks)]
    return f" with {', '.join(extra[:3])}{' ...' if len(extra) > 3 else ''}" if extra else ""


def describe(requests: Sequence[Mapping[str, Any]]) -> str:
    """Returns `allreduce Sum float32[3,2] 'loss'` for a request."""
    return " and ".join(JOIN if request["name"] == JOIN else _described(request) for request in requests) or "nothing"


def _described(request: Mapping[str, Any]) -> str:
    parts = [request["op"], *([request["reduce"]] if request.get("reduce") else [])]
    shapes = request.get("shapes") or request.get("own_shapes") or ()
    parts += [
        f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in zip(request.get("dtypes") or (), shapes, strict=True)
    ][:3]
    parts += ["..."] if len(shapes) > 3 else []
    parts += [f"{key} {request[key]}" for key in ("root", "ranks") if request.get(key) is not None]
    parts += [f"{key} {request[key]:g}" for key in ("prescale", "postscale") if request.get(key) not in (None, 1.0)]
    return " ".join([*parts, repr(request["name"])])
