"""Examples and tokens per second, seconds per step and input wait of each log interval, without waiting for the device;
the share of useful time of a run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Throughput:
    """Times the steps between two log records, without compilation, evaluation and saves (`pause` and `resume`).

    The host runs ahead of the device: an interval lasts from the end of the last logged step to the end of this one. At
    a log step the caller fetches the loss and then immediately passes the time. It pauses only after fetching the
    latest loss; otherwise the time of steps in flight would not be counted.
    """

    def __init__(self, batch_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._batch_size = batch_size
        self._clock = clock
        self._ticks: deque[tuple[int, float, int, int]] = deque()  # (step, wait_s, examples, tokens) since the last one
        self.trained_s = 0.0
        self._last_time: float | None = None
        self._paused_s = 0.0
        self._paused_at: float | None = None

    def start(self) -> None:
        """Starts the first interval. Otherwise the first `tick` does, at the time when its batch was requested."""
        self._last_time = self._clock()
        self._paused_s = 0.0
        self._paused_at = None

    def tick(self, step: int, wait_s: float = 0.0, examples: int | None = None, tokens: int = 0) -> None:
        """Records that `step` was dispatched, after `wait_s` for its batch of `examples` (default: batch_size)."""
        if self._last_time is None:
            self._last_time = self._clock() - wait_s
        self._ticks.append((step, wait_s, self._batch_size if examples is None else examples, tokens))

    def pause(self) -> None:
        """Stops the clock. A second pause before `resume` has no effect."""
        if self._paused_at is None:
            self._paused_at = self._clock()

    def resume(self) -> None:
        """Restarts the clock. Without a `pause` it has no effect."""
        if self._paused_at is not None:
            if self._last_time is not None:
                self._paused_s += self._clock() - max(self._paused_at, self._last_time)
            self._paused_at = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time of a `with` block from the throughput."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def snapshot(self, step: int) -> dict[str, float]:
        """Returns `examples_per_s`, `step_time_s`, `input_wait_s`, and `tokens_per_s` if tokens are counted, of the
        steps since the last snapshot up to `step`, and adds their time to `trained_s`.

        `step_time_s` and `input_wait_s` are means per step. Call it when `step` is known to be finished. Steps
        dispatched after `step` belong to the next interval. Returns {} if there was no step or no time has elapsed.
        """
        now = self._clock()
        steps, waited_s, examples, tokens = 0, 0.0, 0, 0
        while self._ticks and self._ticks[0][0] <= step:
            _, wait_s, num, num_tokens = self._ticks.popleft()
            steps, waited_s, examples, tokens = steps + 1, waited_s + wait_s, examples + num, tokens + num_tokens
        if self._last_time is None:
            return {}
        open_pause_s = now - max(self._paused_at, self._last_time) if self._paused_at is not None else 0.0
        elapsed_s = now - self._last_time - self._paused_s - max(0.0, open_pause_s)
        self._last_time, self._paused_s = now, 0.0
        if not steps or elapsed_s <= 0:
            return {}
        self.trained_s += elapsed_s
        return {
            "examples_per_s": examples / elapsed_s,
            "step_time_s": elapsed_s / steps,
            "input_wait_s": waited_s / steps,
            **({"tokens_per_s": tokens / elapsed_s} if tokens else {}),
        }


class Goodput:
    """The time of the steps that lead to the present state, as a share of the time since the run first started: without
    compilation, evaluations, saves, restarts, the time between attempts, and steps that a restart or a rollback
    repeats (Google's ML productivity goodput, its scheduling and runtime parts).

    `state` is part of each checkpoint.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.state = {"started": clock(), "trained_s": 0.0}

    def add(self, trained_s: float) -> float:
        """Adds the seconds of steps, and returns the share."""
        self.state["trained_s"] += trained_s
        return self.state["trained_s"] / max(self._clock() - self.state["started"], 1e-9)

    def restore(self, saved: dict[str, float]) -> None:
        """Continues from the state of a checkpoint."""
        self.state.update(saved)
