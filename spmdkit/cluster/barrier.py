"""Barriers of the coordination service that no clock and no pause can break, for everybody in the process (orbax too).

The service's own barriers have deadlines by wall time, before jax 0.12 it drops who waits in one when the clock is set
back, and then nobody ever comes out (jaxlib 0.10.2). Keys have neither: who arrives counts itself, the last one opens,
the last one to leave removes what was written.

Cost: five short requests of each process instead of one, 0.7 ms on loopback.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from spmdkit.foundation.deadline import Deadline

OPEN, LATE, GIVEN_UP = "open", "late", "given up: "
SLICE_MS = 200
"""How long a wait that may be ended from outside goes on without looking."""


class Client:
    """A client of the coordination service whose `wait_at_barrier` counts by keys; all else is the given client's.

    Args:
        client: JAX's.
        num_processes: who meets at a barrier that names nobody.

    Attributes:
        is_over: set from any thread, so that nobody waits for the others any more: every call raises CANCELLED.
    """

    def __init__(self, client: Any, num_processes: int):
        self._client, self._num = client, num_processes
        self.is_over, self.can_end = False, False
        self._times: Counter[str] = Counter()
        self._lock = Lock()

    @property
    def own(self) -> Any:
        """JAX's own client."""
        return self._client

    def __getattr__(self, name: str) -> Any:
        self._check()
        return getattr(self._client, name)

    def _check(self) -> None:
        if self.is_over:
            raise RuntimeError("CANCELLED: this generation is over")

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> Any:
        """Returns the value, waiting for it. Raises RuntimeError: DEADLINE_EXCEEDED, or CANCELLED."""
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
        """Returns when all of `process_ids` (None: all processes) are here, as the service's own does. A name may be
        used again.

        Raises:
            RuntimeError: DEADLINE_EXCEEDED after `timeout_in_ms`; ABORTED where somebody has given it up, with the
                reason.
        """
        folder = self._next(barrier_id)
        num = self._num if process_ids is None else len(process_ids)
        if self._client.key_value_increment(f"{folder}/come", 1) >= num:
            self._decide(folder, OPEN)
        elif self._decided(folder, timeout_in_ms) is None:
            self._decide(folder, LATE)
        how = self._decided(folder, timeout_in_ms)
        if how is not None and how.startswith(GIVEN_UP):
            raise RuntimeError(f"ABORTED: {how.removeprefix(GIVEN_UP)}")
        if how != OPEN:
            raise RuntimeError(
                f"DEADLINE_EXCEEDED: barrier {barrier_id!r}: not all {num} processes came within {timeout_in_ms / 1000:g} s"
            )
        if self._client.key_value_increment(f"{folder}/gone", 1) >= num:
            self._client.key_value_delete(folder)

    def give_up(self, barrier_id: str, why: str) -> None:
        """In the place of a visit: nobody waits there any more. A barrier that is open already stays so."""
        self._decide(self._next(barrier_id), f"{GIVEN_UP}{why}")

    def _next(self, barrier_id: str) -> str:
        """Returns where this visit to a barrier is counted."""
        with self._lock:
            self._times[barrier_id] += 1
            return f"barriers/{barrier_id}/{self._times[barrier_id]}"

    def _decide(self, folder: str, how: str) -> None:
        """Says for all how it ends, where nobody has said so before."""
        with suppress(RuntimeError):  # ALREADY_EXISTS
            self._client.key_value_set(f"{folder}/ended", how)

    def _decided(self, folder: str, timeout_in_ms: int) -> str | None:
        """Returns how it ends, None when that is not known in time."""
        try:
            return str(self.blocking_key_value_get(f"{folder}/ended", timeout_in_ms))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
