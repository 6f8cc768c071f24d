"""`Carried`: how the state of a reducer gets into a step and out of it again with what it tells, and the gradient to
the step's guard; the only thing that leaves a trace by another way than its results.

A user writes `(loss, metrics), grads = sk.value_and_grad(loss_fn)(params, batch, key)`, and the reducer behind it may
keep something from step to step. It lives in `TrainState.reducer`, one entry for each call in the order of tracing.
Each call takes its entry and puts the new one, once; what was put has to be an array of the step itself, and so a call
inside of the user's own loop, branch, `vmap` or `jit` is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from spmdkit import compat
from spmdkit.errors import ConfigError

PACKAGE = str(Path(__file__).parents[1])


class Carried:
    """The reducer's state on its way through one trace of a step.

    Args:
        states: `TrainState.reducer`, one entry for each call.
        gradients: where the calls are still to be found: notes the gradient of each, and no state is given to any.
    """

    def __init__(self, states: Sequence[Any], gradients: list[Any] | None = None):
        self._states: Sequence[Any] = () if gradients is not None else states
        self._gradients = gradients
        self._put: list[Any] = []
        self._seen: list[Any] = []
        self.told: dict[str, jax.Array] = {}
        self._all_seen = True
        self._trace = compat.current_trace()

    def take(self, gradient: Any) -> Any:
        """Returns the state of the next call, whose gradient is shaped like `gradient`; None where it has none.

        Raises:
            ConfigError: the call stands inside of a loop, branch, `vmap` or `jit` of the user's, or is one more than in
                the first trace.
        """
        if self._gradients is not None:
            self._gradients.append(gradient)
        elif not self._states:
            return None
        if compat.current_trace() is not self._trace:
            raise ConfigError(
                f"sk.value_and_grad is called inside of a loop, a branch, a vmap or a jit of its own, at {_calling_line()}, and the "
                "config's reducer keeps something from step to step, once for each call. Call it outside (microbatches: N accumulates "
                "gradients without a loop of yours), or use reducer: sum."
            )
        if self._gradients is not None:
            return None
        if len(self._put) == len(self._states):
            raise ConfigError(
                f"sk.value_and_grad is called more often in this trace than in the first one ({len(self._states)} times), at "
                f"{_calling_line()}. The reducer's state has one entry for each call. Call it the same number of times in every trace."
            )
        return self._states[len(self._put)]

    def put(self, state: Any) -> None:
        """Takes the new state of the call that took last."""
        if self._states:
            self._put.append(state)

    def tell(self, numbers: Mapping[str, jax.Array]) -> None:
        """Takes what the reducer tells of a call, for the metrics of the step (`told`); of several calls the largest.
        Nothing leaves a loop of the user's."""
        if compat.current_trace() is self._trace:
            self.told |= {name: jnp.maximum(self.told.get(name, x), x) for name, x in numbers.items()}

    def see(self, gradient: Any) -> None:
        """Takes note of a gradient that the optimizer is given, for the guard of the step; one inside of a trace of the
        user's own cannot leave it."""
        if compat.current_trace() is self._trace:
            self._seen.append(gradient)
        else:
            self._all_seen = False

    @property
    def seen(self) -> list[Any] | None:
        """The gradients that the optimizer was given; None where some, or all, cannot be seen from here."""
        return self._seen if self._seen and self._all_seen else None

    def collected(self) -> tuple[Any, ...]:
        """Returns the new `TrainState.reducer`.

        Raises:
            ConfigError: there were fewer calls than in the first trace.
        """
        if len(self._put) != len(self._states):
            raise ConfigError(
                f"sk.value_and_grad is called {len(self._put)} times in this trace and {len(self._states)} times in the "
                "first one. The reducer's state has one entry for each call. Call it the same number of times in every trace."
            )
        return tuple(self._put)


def _calling_line() -> str:
    """Returns `file.py:12 (function)` of the innermost frame that is neither spmdkit's nor JAX's."""
    frame = sys._getframe()
    ours = (PACKAGE, str(Path(jax.__file__).parent))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
