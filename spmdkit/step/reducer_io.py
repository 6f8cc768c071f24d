"""`ReducerSlots`: passes the reducer's state and metrics into and out of a traced step, and the gradient and the sizes
of updates to the checks. Apart from the results it is the only output of a trace.

`TrainState.reducer` has one entry per call of `sk.value_and_grad`, in the order of tracing. A new state must belong to
the trace of the step, so calls inside a user's loop, branch, `vmap` or `jit` are rejected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from spmdkit import compat
from spmdkit.errors import ConfigError

PACKAGE = str(Path(__file__).parents[1])


class ReducerSlots:
    """The reducer's state during one trace of a step: `TrainState.reducer`, one entry per call."""

    def __init__(self, states: Sequence[Any] = ()):
        self._states = states
        self._put: list[Any] = []
        self._updates: list[Any] = []
        self.metrics: dict[str, jax.Array] = {}
        self._all_recorded = True
        self.sizes: jax.Array | None = None
        self.clipped_squares: jax.Array | None = None
        self._trace = compat.current_trace()

    def take(self) -> Any:
        """Returns the state of the next call; None if it has no state.

        Raises:
            ConfigError: the call is inside a user's loop, or there are more calls than in the first trace.
        """
        if not self._states:
            return None
        if compat.current_trace() is not self._trace:
            raise ConfigError(
                f"sk.value_and_grad is called inside a loop, a branch, a vmap or a jit, at {_calling_line()}, and the "
                "config's reducer has a state, one for each call. Call it outside (microbatches: N accumulates "
                "gradients without a loop), or use reducer: sum."
            )
        if len(self._put) == len(self._states):
            raise ConfigError(
                f"sk.value_and_grad is called more often in this trace than in the first one ({len(self._states)} "
                f"times), at {_calling_line()}. The reducer's state has one entry for each call. Call it the same "
                "number of times in every trace."
            )
        return self._states[len(self._put)]

    def put(self, state: Any) -> None:
        """Stores the new state of the most recent call."""
        if self._states:
            self._put.append(state)

    def add_metrics(self, numbers: Mapping[str, jax.Array]) -> None:
        """Adds the reducer's metrics of one call; over several calls the largest value is used. Metrics of calls inside
        a user's loop are dropped."""
        if compat.current_trace() is self._trace:
            self.metrics |= {name: jnp.maximum(self.metrics.get(name, x), x) for name, x in numbers.items()}

    def record_update(self, gradient: Any) -> None:
        """Records a gradient passed to the optimizer, for the guard. A gradient inside a loop cannot be used."""
        if compat.current_trace() is self._trace:
            self._updates.append(gradient)
        else:
            self._all_recorded = False

    def record_norm(self, norm: jax.Array) -> None:
        """Adds the norm of a gradient that is clipped (`clip_norm`). One inside a user's loop is not recorded."""
        if compat.current_trace() is self._trace:
            before = jnp.float32(0) if self.clipped_squares is None else self.clipped_squares
            self.clipped_squares = before + jnp.square(norm.astype(jnp.float32))

    def record_sizes(self, compute: Callable[[], jax.Array | None]) -> None:
        """Adds the sizes of one update (lost_updates.py). Updates inside a user's loop are not measured."""
        if compat.current_trace() is self._trace and (sizes := compute()) is not None:
            self.sizes = sizes if self.sizes is None else self.sizes + sizes

    @property
    def update_gradients(self) -> list[Any] | None:
        """The gradients passed to the optimizer; None if there are none, or if some cannot be used."""
        return self._updates if self._updates and self._all_recorded else None

    def new_state(self) -> tuple[Any, ...]:
        """Returns the new `TrainState.reducer`; raises ConfigError after fewer calls than in the first trace."""
        if len(self._put) != len(self._states):
            raise ConfigError(
                f"sk.value_and_grad is called {len(self._put)} times in this trace and {len(self._states)} times in "
                "the first one. The reducer's state has one entry for each call. Call it the same number of times in "
                "every trace."
            )
        return tuple(self._put)


def _calling_line() -> str:
    """Returns `file.py:12 (function)` of the innermost frame outside of spmdkit and JAX."""
    frame = sys._getframe()
    ours = (PACKAGE, str(Path(jax.__file__).parent))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
