"""Learning-rate schedules that optax lacks. Each takes the step number, counted from 0, and returns the rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Schedule = Callable[[Any], Any]


def log_warmup_schedule(init_value: float, peak_value: float, warmup_steps: int) -> Schedule:
    """Returns a logarithmic warm-up: init_value + (peak_value - init_value) log(step) / log(warmup_steps), and
    peak_value from warmup_steps (at least 2) on.

    Source: DeepSpeed's WarmupLR, deepspeed/runtime/lr_schedules.py.
    """
    import jax.numpy as jnp

    last = max(2, warmup_steps)

    def schedule(step: Any) -> Any:
        fraction = jnp.log(jnp.clip(step, 1, last).astype(jnp.float32)) / jnp.log(float(last))
        return init_value + (peak_value - init_value) * fraction

    return schedule


def power_schedule(
    init_value: float, transition_steps: int, growth: float = 1.0, power: float = -1.0, staircase: bool = False
) -> Schedule:
    """Returns init_value (1 + growth step / transition_steps) ** power: inverse time decay by default, an inverse
    square root with power -0.5, a linear range test with power 1. staircase: step / transition_steps is rounded down.
    """
    import jax.numpy as jnp

    if not transition_steps > 0:
        raise ValueError(f"transition_steps is positive, found {transition_steps}")

    def schedule(step: Any) -> Any:
        intervals = jnp.asarray(step, jnp.float32) / transition_steps
        return init_value * (1 + growth * (jnp.floor(intervals) if staircase else intervals)) ** power

    return schedule
