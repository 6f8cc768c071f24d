"""`Cluster`: the processes that train together, their devices, and the exchange of small values.

Exchanges use JAX's coordination service (TCP), never a collective: a collective has no timeout and does not name the
missing process. Every wait is bounded. With one process everything is local.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from spmdkit import errors
from spmdkit.cluster.agreement import Agreement
from spmdkit.cluster.comparison import (
    GIVE_THE_SAME,
    Facts,
    difference_message,
    differences,
    digest,
    name_processes,
    shortened,
)
from spmdkit.cluster.service import ServiceConnection
from spmdkit.cluster.store import Store
from spmdkit.errors import ConfigError, RendezvousError
from spmdkit.foundation import phase
from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.timeouts import COMPARISON_LINGER_S, COMPARISON_REPLY_S, EXCHANGE_REPORT_S, EXCHANGE_S

# A second cluster object in one process (a notebook, a test) must not use the keys of the first.
_join_count = itertools.count()


class Cluster:
    """The joined processes; created by `join`. Every process makes the same calls in the same order."""

    def __init__(
        self,
        *,
        process_index: int,
        num_processes: int,
        devices: Sequence[jax.Device],
        store: Store,
        namespace: str | None = None,
        notes: Sequence[str] = (),
        advertises: str = "127.0.0.1",
        connection: ServiceConnection | None = None,
    ):
        self._connection = connection
        self.advertises = advertises  # the address that CPU collectives advertise
        self.notes = tuple(notes)  # how the environment was read, for the log
        self.process_index = process_index
        self.num_processes = num_processes
        self.devices = list(devices)
        self._store = store
        self._root = f"spmdkit/{next(_join_count)}" if namespace is None else namespace
        self._num_barriers = self._num_checks = self._num_boards = 0
        self._agreements: dict[str, Agreement] = {}

    @property
    def is_main(self) -> bool:
        """Whether this is process 0, the one that writes files and shows progress."""
        return self.process_index == 0

    def on_service_lost(self, act: Callable[[], None]) -> None:
        """Calls `act`, in a separate thread, if the coordination service ends before this process disconnects. Until
        then JAX's client aborts the process."""
        if self._connection is not None:
            self._connection.on_lost = act

    def board(self, name: str) -> tuple[Store, str]:
        """Returns the store and a new folder in it, for values that may be overwritten."""
        self._num_boards += 1
        return self._store, f"{self._root}/{name}/{self._num_boards}"

    def put(self, key: str, value: str) -> None:
        """Publishes a string to all processes. Each key is used once."""
        self._store.put(f"{self._root}/user/{key}", value)

    def get(self, key: str, timeout_s: float = EXCHANGE_S) -> str:
        """Waits for the value that a process publishes under `key`. Raises RendezvousError after `timeout_s`."""
        try:
            return self._store.get(f"{self._root}/user/{key}", timeout_s)
        except TimeoutError:
            raise RendezvousError(
                f"process {self.process_index} waited {timeout_s:g} s for {key!r}, which no process has published. "
                f"Another process ended or is stuck; see its output. Start all processes again."
            ) from None

    def gather(self, name: str, value: Any, timeout_s: float = EXCHANGE_S) -> list[Any]:
        """Returns the JSON values of all processes on every process, ordered by process index.

        Raises:
            RendezvousError: a process did not arrive within `timeout_s`.
        """
        if self.num_processes == 1:
            return [value]
        return self._exchange(self._next_exchange(), name, value, timeout_s)

    def from_main(self, name: str, make: Callable[[], Any], timeout_s: float = EXCHANGE_S) -> Any:
        """Returns on every process the JSON value that `make` returns on process 0. Only process 0 calls `make`.

        Raises:
            SpmdkitError: raised by `make`; the same on every process. RendezvousError: process 0 did not arrive.
        """
        if self.num_processes == 1:
            return make()
        key = f"{self._next_exchange()}/main/{name}"
        if not self.is_main:
            sent = json.loads(self.get(key, timeout_s))
            if "error" in sent:
                raise getattr(errors, sent["error"])(sent["message"])
            return sent["value"]
        try:
            value = make()
        except errors.SpmdkitError as error:
            self.put(key, json.dumps({"error": type(error).__name__, "message": str(error)}))
            raise
        self.put(key, json.dumps({"value": value}))
        return value

    def first_problem(self, name: str, check: Callable[[], str], timeout_s: float = EXCHANGE_S) -> str:
        """Returns the first problem that `check` reports on any process, the same on every process, or an empty text.

        Raises:
            RendezvousError: `check` raised on another process, or a process did not arrive within `timeout_s`.
        """
        if self.num_processes == 1:
            return check()
        problem: str = next(filter(None, self._gather_results(name, check, timeout_s)), "")
        if problem:  # processes usually exit after this; process 0 may run the store that the others still read
            with contextlib.suppress(RendezvousError):
                self.barrier(f"{name}: reported", timeout_s=EXCHANGE_REPORT_S)
        return problem

    def same_everywhere(
        self, name: str, facts: str | Callable[[], Facts], timeout_s: float = EXCHANGE_S, repair: str = GIVE_THE_SAME
    ) -> None:
        """Checks that all processes have the same text, or the same facts `{name: text}`; `repair` ends the message.
        The facts of process 0 are published only after a difference.

        Raises:
            ConfigError: on every process, naming those that differ from process 0 and the first differing lines.
            RendezvousError: a process did not arrive, or its `facts` raised.
        """
        if self.num_processes == 1:
            return
        mine: dict[str, str] = {}

        def compute() -> str:
            mine.update({name: f"{facts}\n"} if isinstance(facts, str) else facts())
            return digest(mine)

        digests = self._gather_results(name, compute, timeout_s)
        if len(set(digests)) == 1:
            return
        theirs = self.from_main(name, lambda: shortened(mine), COMPARISON_REPLY_S)
        lines = self.gather(name, differences(theirs, shortened(mine)), COMPARISON_REPLY_S)
        phase.mark_ending()
        with contextlib.suppress(RendezvousError):
            self.barrier(f"{name}: reported", timeout_s=EXCHANGE_REPORT_S)
        if self.is_main:
            time.sleep(COMPARISON_LINGER_S)
        raise ConfigError(f"{difference_message(name, lines)} {repair}")

    def _next_exchange(self) -> str:
        self._num_checks += 1
        return f"exchange/{self._num_checks}"

    def _gather_results(self, name: str, make: Callable[[], Any], timeout_s: float) -> list[Any]:
        """Returns the results of `make` on all processes. An exception on one is a RendezvousError on all others."""
        folder = self._next_exchange()
        try:
            mine = {"value": make()}
        except BaseException as error:
            first = (str(error).strip().splitlines() or [""])[0][:300]
            failed = f"process {self.process_index} failed in its check of {name} ({type(error).__name__}: {first})"
            with contextlib.suppress(RendezvousError):
                if self.is_main:
                    self.put(f"{folder}/all/{name}", json.dumps(failed))
                else:
                    self.put(f"{folder}/{self.process_index}/{name}", json.dumps({"failed": failed}))
            phase.mark_ending()
            raise
        reports = self._exchange(folder, name, mine, timeout_s)
        if failed := next((report["failed"] for report in reports if "failed" in report), ""):
            phase.mark_ending()
            raise RendezvousError(f"{failed}. All processes start together. See its output, and start all again.")
        return [report["value"] for report in reports]

    def _exchange(self, folder: str, name: str, value: Any, timeout_s: float) -> list[Any]:
        """Returns the values of all processes. The name is the last part of each key, for the messages of a wait."""
        result: Any = [value]
        if not self.is_main:
            self.put(f"{folder}/{self.process_index}/{name}", json.dumps(value))
            result = json.loads(self.get(f"{folder}/all/{name}", timeout_s + COMPARISON_REPLY_S))
        else:
            deadline = Deadline(timeout_s)
            try:
                for process in range(1, self.num_processes):
                    result.append(json.loads(self.get(f"{folder}/{process}/{name}", deadline.remaining_s)))
            except RendezvousError:
                result = f"process {process} did not report {name} within {timeout_s:g} s"
            self.put(f"{folder}/all/{name}", json.dumps(result))
        if isinstance(result, str):
            phase.mark_ending()
            raise RendezvousError(f"{result}. All processes start together. See its output, and start all again.")
        return list(result)

    def barrier(self, name: str, timeout_s: float = EXCHANGE_S) -> None:
        """Waits for every process. Raises RendezvousError with the missing processes after `timeout_s`."""
        if self.num_processes == 1:
            return
        key = f"{self._root}/barrier/{self._num_barriers}-{name}"
        self._num_barriers += 1
        self._store.put(f"{key}/arrived/{self.process_index}", "")
        try:
            self._store.barrier(key, timeout_s)
        except TimeoutError:
            arrived = {int(p) for p in self._store.entries(f"{key}/arrived")}
            missing = [p for p in range(self.num_processes) if p not in arrived]
            who = f"{name_processes(missing)} did not reach it" if missing else "the last one was too late"
            raise RendezvousError(
                f"barrier {name!r}: process {self.process_index} waited {timeout_s:g} s for {self.num_processes} "
                f"processes, {who}. All processes must reach the barrier within the timeout. See the output of the "
                f"missing ones, and start all again."
            ) from None

    def agree(self, name: str, step: int, request: bool, lag: int) -> bool:
        """Returns True on every process at the same step, once per request by any process; False at all others.

        Every process calls it at every step in sequence; each loop uses a different name. `lag` is the number of steps
        that may be in flight; a process further ahead waits for process 0. The decided step is `step + lag + 1` of
        process 0, or about 50 ms later when steps are faster than that (agreement.py).
        """
        if self.num_processes == 1:
            return request
        if name not in self._agreements:
            self._agreements[name] = Agreement(self._store, f"{self._root}/agree/{name}", self.process_index)
        return self._agreements[name].at(step, request, lag)

    def shutdown(self, timeout_s: float = 60.0) -> None:
        """Disconnects all processes from the cluster together, after success. A failed process exits without it.

        Raises:
            RendezvousError: another process does not arrive within `timeout_s`.
        """
        if self.num_processes == 1:
            return
        self.barrier("shutdown", timeout_s)
        jax.distributed.shutdown()
