"""What a drill does inside of a process: at a step, at a save, or at once (protocol.py says how it is ordered).

Arrays are changed on this process alone, by no collective: what the others hold is as it was, which is the point.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit.faults.injection.fault import FROM_HERE
from spmdkit.faults.injection.protocol import ORDER_BYTES, SAID_AT, SIGNALS, SLOW_FOR_S, SLOWER_S
from spmdkit.foundation import phase as foundation_phase


class Inside:
    """The orders of one process. `before_step`, `after_save` and `step` are called by the run."""

    def __init__(self, path: str):
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._raw, self._order, self._saves, self._step = b"", dict[str, Any](), 0, 0
        self._done = self._last_said()  # by this process in an epoch before
        self._slow_until = 0.0
        self._spoil: Callable[[Any, Any], tuple[Any, Any]] | None = None

    def before_step(self, step: int) -> None:
        """Does what is ordered for this step, or for now."""
        self._step = step
        raw = os.pread(self._descriptor, ORDER_BYTES, 0)
        if raw != self._raw:
            with suppress(ValueError):  # half written: the rest is there at the next step
                self._order, self._raw = json.loads(raw.rstrip(b" \0") or b"{}"), raw
                if self._order.get("number") == self._done:
                    self._order = {}
        order = self._order
        if order and (order["at"] == "now" or (order["at"] == "step" and step >= order["moment"])):
            self._do(order)
        if time.monotonic() < self._slow_until:
            time.sleep(SLOWER_S)

    def after_save(self) -> None:
        """Does what is ordered for a save, which has begun."""
        self._saves += 1
        if self._order and self._order["at"] == "save" and self._saves >= self._order["moment"]:
            self._do(self._order)

    def step(self, real: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Returns a step that may be given another state or batch, here alone."""

        def stepped(state: Any, batch: Any) -> Any:
            spoil, self._spoil = self._spoil, None
            return real(*(spoil(state, batch) if spoil is not None else (state, batch)))

        return stepped

    def _last_said(self) -> int | None:
        """Returns the number of the order that was carried out last."""
        with suppress(ValueError):
            said = json.loads(os.pread(self._descriptor, ORDER_BYTES, SAID_AT).rstrip(b" \0") or b"{}")
            return int(said["number"]) if said else None
        return None

    def _do(self, order: dict[str, Any]) -> None:
        self._order = {}
        kind, number = order["kind"], order["number"]
        if kind in SIGNALS:
            self._later(order["delay_s"], lambda: self._signal(number, SIGNALS[kind]))
        elif kind in FROM_HERE:  # and now is the moment for it
            self._later(order["delay_s"], lambda: self._said(number))
        elif kind == "hang":
            self._said(number)
            with foundation_phase.during("data"):
                while True:
                    time.sleep(60)
        elif kind == "slow":
            self._slow_until = time.monotonic() + SLOW_FOR_S
            self._said(number)
        else:
            spoiled = {"nan": _with_nan, "bit-flip": _with_flip}[kind]
            self._spoil = lambda state, batch: self._spoiled(
                number, spoiled, state, batch, random.Random(order["seed"])
            )

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        if delay_s <= 0:
            return act()
        timer = threading.Timer(delay_s, act)
        timer.daemon = True
        timer.start()

    def _signal(self, number: int, which: signal.Signals) -> None:
        self._said(number)
        os.kill(os.getpid(), which)

    def _spoiled(self, number: int, spoil: Callable[..., Any], state: Any, batch: Any, rng: random.Random) -> Any:
        try:
            spoiled = spoil(state, batch, rng)
        except ValueError as error:
            self._said(number, failed=str(error))
            return state, batch
        self._said(number)
        return spoiled

    def _said(self, number: int, failed: str = "") -> None:
        phase = foundation_phase.current_phase().phase
        said = {"number": number, "time": time.monotonic(), "step": self._step, "phase": phase, "failed": failed}
        os.pwrite(self._descriptor, json.dumps(said).ljust(ORDER_BYTES).encode(), SAID_AT)


def _with_nan(state: Any, batch: Any, rng: random.Random) -> tuple[Any, Any]:
    """Returns (state, batch) with a NaN in the first row that this process holds."""
    leaves, treedef = jax.tree.flatten(batch.examples)
    number = next((n for n, leaf in enumerate(leaves) if _has_rows_of_floats(leaf)), None)
    if number is None:
        raise ValueError(
            "nan: the batch has no leaf with rows of floating-point numbers that could be one. Try bit-flip."
        )

    def spoil(part: np.ndarray) -> None:
        part.reshape(part.shape[0], -1)[0] = np.nan

    leaves[number] = _changed(leaves[number], spoil)
    return state, dataclasses.replace(batch, examples=jax.tree.unflatten(treedef, leaves))


def _has_rows_of_floats(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.ndim > 0 and leaf.size > 0


def _with_flip(state: Any, batch: Any, rng: random.Random) -> tuple[Any, Any]:
    """Returns (state, batch) with one bit of the fraction flipped in this process's first copy of the largest
    parameter."""
    leaves, treedef = jax.tree.flatten(state.params)
    floats = [n for n, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size]
    if not floats:
        raise ValueError("bit-flip: there is no parameter of floating-point numbers.")
    number = max(floats, key=lambda n: leaves[n].size)

    def spoil(part: np.ndarray) -> None:
        flat = part.reshape(-1).view(np.uint8)
        size = part.dtype.itemsize
        flat[rng.randrange(part.size) * size + max(0, size - 3 if size > 2 else 0)] ^= 1 << rng.randrange(6)

    leaves[number] = _changed(leaves[number], spoil)
    return state.replace(params=jax.tree.unflatten(treedef, leaves)), batch


def _changed(array: jax.Array, spoil: Callable[[np.ndarray], None]) -> jax.Array:
    """Returns an array whose shard on this process's first device is changed in place by `spoil`; the other shards are
    those of `array`."""
    first, *others = array.addressable_shards
    part = np.array(first.data)
    spoil(part)
    shards = [jax.device_put(part, first.device), *(shard.data for shard in others)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
