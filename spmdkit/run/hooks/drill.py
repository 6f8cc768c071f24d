"""Does in this process what a drill orders; nothing outside of `spmdkit drill`, which sets the variable."""

from __future__ import annotations

import os
from typing import Any

from spmdkit.foundation.constants import DRILL_FILE
from spmdkit.run.hooks.base import Hook

AFTER_THE_WATCHDOG = 2000
"""So that the phase that it says itself stands."""


def make(config: Any) -> Hook | None:
    """Returns the hook that takes a drill's orders, None where there is no drill."""
    path = os.environ.get(DRILL_FILE)
    if not path:
        return None
    from spmdkit.faults.injection.inject import Inside

    inside = Inside(path)

    def begin(run: Any, step: int, state: Any) -> None:
        run.program.step = inside.step(run.program.step)

    return Hook(
        "drill",
        order=AFTER_THE_WATCHDOG,
        begin=begin,
        before_step=lambda run, step, state: inside.before_step(step),
        after_save=lambda run, step: inside.after_save(),
    )
