"""Barriers on the coordination service that tolerate clock changes and pauses, for all code in the process (including
orbax).

The service's own barriers have wall-time deadlines, and before jax 0.12 never complete if the clock is set back (jaxlib
0.10.2). Keys have no deadlines. Each arriving process increments a counter, the last to arrive opens the barrier, and
the last to leave removes the keys. Cost: five short requests instead of one, 0.7 ms on loopback.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from spmdkit.foundation import phase
from spmdkit.foundation.deadline import Deadline

OPEN, LATE, GIVEN_UP = "open", "late", "given up: "
SLICE_MS = 200
"""The longest request of a wait that another thread may cancel."""


class Client:
    """A client of the coordination service with a `wait_at_barrier` by keys; JAX's client handles other calls.

    Attributes:
        is_over: set from any thread to cancel all waits: every call raises CANCELLED.
    """

    def __init__(self, client: Any, num_processes: int):
        self._client, self._num = client, num_processes
        self.is_over, self.can_end = False, False
        self._times: Counter[str] = Counter()
        self._lock = Lock()

    @property
    def own(self) -> Any:
        """JAX's client, also after the generation is over (compat/membership.py)."""
        return self._client

    def __getattr__(self, name: str) -> Any:
        self._check()
        return getattr(self._client, name)

    def _check(self) -> None:
        if self.is_over:
            raise RuntimeError("CANCELLED: this generation is over")

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> Any:
        """Waits for the value. Raises RuntimeError: DEADLINE_EXCEEDED, or CANCELLED."""
        deadline = Deadline(timeout_in_ms / 1000)
        while True:
            self._check()
            left_ms = round(1000 * deadline.remaining_s)
            is_last = not self.can_end or left_ms <= SLICE_MS
            try:
                return self._client.blocking_key_value_get(key, left_ms if is_last else SLICE_MS)
            except RuntimeError as error:
                if is_last or "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int, process_ids: Sequence[int] | None = None) -> None:
        """Waits for all of `process_ids` (None: all processes), like the service's own barrier. Names are reusable.

        Raises:
            RuntimeError: DEADLINE_EXCEEDED after `timeout_in_ms`; ABORTED, with the reason, if a process gave up.
        """
        folder = self._next(barrier_id)
        num = self._num if process_ids is None else len(process_ids)
        if self._client.key_value_increment(f"{folder}/arrived", 1) >= num:
            self._decide(folder, OPEN)
        else:
            with phase.waiting(barrier_id):  # also in orbax: the process that others wait for is at fault
                opened = self._decided(folder, timeout_in_ms)
            if opened is None:
                self._decide(folder, LATE)
        how = self._decided(folder, timeout_in_ms)
        if how is not None and how.startswith(GIVEN_UP):
            raise RuntimeError(f"ABORTED: {how.removeprefix(GIVEN_UP)}")
        if how != OPEN:
            late = f"not all {num} processes arrived within {timeout_in_ms / 1000:g} s"
            raise RuntimeError(f"DEADLINE_EXCEEDED: barrier {barrier_id!r}: {late}")
        if self._client.key_value_increment(f"{folder}/left", 1) >= num:
            self._client.key_value_delete(folder)

    def give_up(self, barrier_id: str, why: str) -> None:
        """Cancels the wait of all others instead of arriving. An open barrier stays open."""
        self._decide(self._next(barrier_id), f"{GIVEN_UP}{why}")

    def _next(self, barrier_id: str) -> str:
        with self._lock:
            self._times[barrier_id] += 1
            return f"barriers/{barrier_id}/{self._times[barrier_id]}"

    def _decide(self, folder: str, how: str) -> None:
        with suppress(RuntimeError):  # ALREADY_EXISTS
            self._client.key_value_set(f"{folder}/ended", how)

    def _decided(self, folder: str, timeout_in_ms: int) -> str | None:
        try:
            return str(self.blocking_key_value_get(f"{folder}/ended", timeout_in_ms))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
