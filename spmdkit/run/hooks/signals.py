"""Stops when a signal asked any process to: SIGINT and SIGTERM (see `spmdkit.faults.signals`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spmdkit.errors import Preempted
from spmdkit.run.hooks.base import Action, Hook, Stop

if TYPE_CHECKING:
    from spmdkit.run.run import Run


def make(config: Any) -> Hook:
    """Returns the hook that asks to stop, to be started again later."""

    def after_step(run: Run, step: int, state: Any, metrics: Any) -> Action | None:
        asked = run.signals is not None and run.signals.requested is not None
        return Stop(Preempted.exit_code) if asked else None

    return Hook("signals", order=45, after_step=after_step)
