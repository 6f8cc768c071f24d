"""`FaultInjector`: injects the faults of a drill into this process, at a step, at a save, or immediately (fault.py). It
changes arrays on this process only: the other replicas retain their values."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit.faults.injection.fault import (
    INJECTED_BY_DRILL,
    REQUEST_BYTES,
    RESULT_OFFSET,
    SIGNALS,
    STEP_DELAY_S,
    TEMPORARY_FOR_S,
)
from spmdkit.foundation import phase
from spmdkit.foundation.constants import DRILL_FILE


def inject_at_phases() -> None:
    """Injects the faults that a drill requests at the phases of this process; no effect outside of a drill."""
    if path := os.environ.get(DRILL_FILE):
        phase.on_change = FaultInjector(path).enter_phase


class FaultInjector:
    """The requested faults of one process. The run calls `before_step` and `after_save`, and wraps its step."""

    def __init__(self, path: str):
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._raw, self._request, self._saves, self._step = b"", dict[str, Any](), 0, 0
        self._last_injected = self._read_result()  # by this process, under an earlier membership
        self._slow_until = 0.0
        self._corrupt: Callable[[Any, Any], tuple[Any, Any]] | None = None

    def before_step(self, step: int) -> None:
        """Injects a fault that is due at this step or immediately."""
        self._step = step
        self._read_request()
        request = self._request
        if request and (request["at"] == "now" or (request["at"] == "step" and step >= request["moment"])):
            self._inject(request)
        if time.monotonic() < self._slow_until:
            time.sleep(STEP_DELAY_S)

    def enter_phase(self, place: phase.Phase) -> None:
        """Injects a fault that is due in this phase."""
        self._step = place.step
        self._read_request()
        request = self._request
        is_due = request.get("at") == "phase" and place.phase.partition(" ")[0] == request["phase"]
        if is_due and place.step >= request["moment"]:
            self._inject(request)

    def after_save(self) -> None:
        """Injects a fault that is due at this save, which has started."""
        self._saves += 1
        if self._request and self._request["at"] == "save" and self._saves >= self._request["moment"]:
            self._inject(self._request)

    def wrap_step(self, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Returns a step that receives a corrupted state or batch when a fault is due."""

        def injected_step(state: Any, batch: Any) -> Any:
            corrupt, self._corrupt = self._corrupt, None
            return step(*(corrupt(state, batch) if corrupt is not None else (state, batch)))

        return injected_step

    def _read_request(self) -> None:
        raw = os.pread(self._descriptor, REQUEST_BYTES, 0)
        if raw != self._raw:
            with suppress(ValueError):  # half written: complete at the next step
                self._request, self._raw = json.loads(raw.rstrip(b" \0") or b"{}"), raw
                if self._request.get("number") == self._last_injected:
                    self._request = {}

    def _read_result(self) -> int | None:
        with suppress(ValueError):
            result = json.loads(os.pread(self._descriptor, REQUEST_BYTES, RESULT_OFFSET).rstrip(b" \0") or b"{}")
            return int(result["number"]) if result else None
        return None

    def _inject(self, request: dict[str, Any]) -> None:
        self._request = {}
        kind, number = request["kind"], request["number"]
        if kind in SIGNALS:
            self._after(request["delay_s"], lambda: self._send_signal(number, SIGNALS[kind]))
        elif kind in INJECTED_BY_DRILL:  # the drill waits for this moment
            self._after(request["delay_s"], lambda: self._write_result(number))
        elif kind == "hang":
            self._write_result(number)
            with nullcontext() if request["at"] == "phase" else phase.during("data"):
                while True:
                    time.sleep(60)
        elif kind == "slow":
            self._slow_until = time.monotonic() + TEMPORARY_FOR_S
            self._write_result(number)
        else:
            corrupt, rng = {"nan": _with_nan, "bit-flip": _with_bit_flip}[kind], random.Random(request["seed"])
            self._corrupt = lambda state, batch: self._corrupted(number, corrupt, state, batch, rng)

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        if delay_s <= 0:
            return action()
        timer = threading.Timer(delay_s, action)
        timer.daemon = True
        timer.start()

    def _send_signal(self, number: int, which: signal.Signals) -> None:
        self._write_result(number)
        os.kill(os.getpid(), which)

    def _corrupted(self, number: int, corrupt: Callable[..., Any], state: Any, batch: Any, rng: random.Random) -> Any:
        try:
            corrupted = corrupt(state, batch, rng)
        except ValueError as error:
            self._write_result(number, failed=str(error))
            return state, batch
        self._write_result(number)
        return corrupted

    def _write_result(self, number: int, failed: str = "") -> None:
        name = phase.current_phase().phase
        result = {"number": number, "time": time.monotonic(), "step": self._step, "phase": name, "failed": failed}
        os.pwrite(self._descriptor, json.dumps(result).ljust(REQUEST_BYTES).encode(), RESULT_OFFSET)


def _with_nan(state: Any, batch: Any, rng: random.Random) -> tuple[Any, Any]:
    leaves, treedef = jax.tree.flatten(batch.examples)
    number = next((n for n, leaf in enumerate(leaves) if _has_float_rows(leaf)), None)
    if number is None:
        raise ValueError("nan: the batch has no leaf of floating-point rows that could hold a NaN. Try bit-flip.")

    def corrupt(shard: np.ndarray) -> None:
        shard.reshape(shard.shape[0], -1)[0] = np.nan

    leaves[number] = _corrupted_shard(leaves[number], corrupt)
    return state, dataclasses.replace(batch, examples=jax.tree.unflatten(treedef, leaves))


def _has_float_rows(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.ndim > 0 and leaf.size > 0


def _with_bit_flip(state: Any, batch: Any, rng: random.Random) -> tuple[Any, Any]:
    """Flips one mantissa bit in this process's first shard of the largest parameter."""
    leaves, treedef = jax.tree.flatten(state.params)
    floats = [n for n, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size]
    if not floats:
        raise ValueError("bit-flip: the task has no floating-point parameter.")
    number = max(floats, key=lambda n: leaves[n].size)

    def corrupt(shard: np.ndarray) -> None:
        flat = shard.reshape(-1).view(np.uint8)
        size = shard.dtype.itemsize
        flat[rng.randrange(shard.size) * size + max(0, size - 3 if size > 2 else 0)] ^= 1 << rng.randrange(6)

    leaves[number] = _corrupted_shard(leaves[number], corrupt)
    return state.replace(params=jax.tree.unflatten(treedef, leaves)), batch


def _corrupted_shard(array: jax.Array, corrupt: Callable[[np.ndarray], None]) -> jax.Array:
    """Returns the array with its shard on this process's first device changed in place by `corrupt`."""
    first, *others = array.addressable_shards
    shard = np.array(first.data)
    corrupt(shard)
    shards = [jax.device_put(shard, first.device), *(other.data for other in others)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
