"""Injects the faults that a drill requests for this process; does nothing outside `spmdkit drill`."""

from __future__ import annotations

import os
from typing import Any

from spmdkit.foundation.constants import DRILL_FILE
from spmdkit.run.hooks.base import Hook, RunView

AFTER_WATCHDOG = 2000  # so that the phase of the fault stays the current phase


def make(config: Any) -> Hook | None:
    """Returns the hook that injects faults; None outside a drill."""
    path = os.environ.get(DRILL_FILE)
    if not path:
        return None
    from spmdkit.faults.injection.inject import FaultInjector

    injector = FaultInjector(path)

    def begin(run: RunView, step: int, state: Any) -> None:
        run.program.step = injector.wrap_step(run.program.step)  # type: ignore[method-assign,assignment]

    return Hook(
        "drill",
        order=AFTER_WATCHDOG,
        begin=begin,
        before_step=lambda run, step, state: injector.before_step(step),
        after_save=lambda run, step: injector.after_save(),
    )
