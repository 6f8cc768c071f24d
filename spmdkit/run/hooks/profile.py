"""Records a profiler trace of the steps in `profile`."""

from __future__ import annotations

from typing import Any

import jax

from spmdkit.run.hooks.base import Hook, RunView


def make(config: Any) -> Hook | None:
    """Returns the hook that starts and stops the trace; None if the config requests none."""
    options = config.profile
    if options is None:
        return None
    until: list[int] = []  # the last step of the active trace

    def after_step(run: RunView, step: int, state: Any, metrics: Any) -> None:
        if step == options.start - 1 or (options.start == 1 and step == 1):
            jax.block_until_ready(metrics)
            jax.profiler.start_trace(str(run.directory / "profile"))
            until.append(max(step, options.start - 1) + options.steps)
        elif until and step == until[0]:
            jax.block_until_ready(metrics)
            stop()
            run.message(f"profile of {options.steps} steps: {run.directory / 'profile'}")

    def stop(*_: Any) -> None:
        if until:
            until.clear()
            jax.profiler.stop_trace()

    return Hook("profile", order=35, after_step=after_step, end=stop)
