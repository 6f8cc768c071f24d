"""Stops when any process has received a stop signal, such as SIGINT or SIGTERM (`spmdkit.faults.signals`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spmdkit.errors import Preempted
from spmdkit.run.hooks.base import Action, Hook, Stop

if TYPE_CHECKING:
    from spmdkit.run.run import Run


def make(config: Any) -> Hook:
    """Returns the hook that requests a stop with code 42."""

    def after_step(run: Run, step: int, state: Any, metrics: Any) -> Action | None:
        is_requested = run.signals is not None and run.signals.requested is not None
        return Stop(Preempted.exit_code) if is_requested else None

    return Hook("signals", order=45, after_step=after_step)  # type: ignore[arg-type]  # it gets a Run
