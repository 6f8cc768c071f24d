"""Ends the run after a wall time, with the state saved. With `restart: false` the run is finished (exit code 0), and
the time of all its attempts counts. With `restart: true` the process exits with 42, to be continued by the next job
of a scheduler, and the time of this attempt counts. Compilation counts, starting the process does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spmdkit.errors import ConfigError, Preempted
from spmdkit.foundation.formatting import format_duration
from spmdkit.run.hooks.base import Action, Hook, Stop

if TYPE_CHECKING:
    from spmdkit.run.run import Run


def make(seconds: float, restart: bool = False) -> Hook:
    """Returns the hook. Process 0 decides by its clock, and all processes stop at the same step."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"stop_after: seconds is {seconds!r}. It is a positive time. Write seconds: 3600.")
    before_s, times = [0.0], list[float]()  # of earlier attempts; (begin, last step) of this one

    def begin(run: Run, step: int, state: Any) -> None:
        times[:] = [run.clock()] * 2

    def after_step(run: Run, step: int, state: Any, metrics: Any) -> Action | None:
        times[1] = run.clock()
        spent_s = times[1] - times[0] + (0.0 if restart else before_s[0])
        if spent_s < seconds:
            return None
        return Stop(Preempted.exit_code if restart else 0, f"stop_after: {format_duration(spent_s)} have passed")

    def restore(saved: dict[str, float]) -> None:
        if not times:  # not after a rollback
            before_s[0] = saved["spent_s"]

    calls: dict[str, Any] = {"begin": begin, "after_step": after_step}  # they get a Run
    state = lambda: {"spent_s": before_s[0] + (times[1] - times[0] if times else 0.0)}
    return Hook("stop_after", on="main", state=state, restore=restore, **calls)
