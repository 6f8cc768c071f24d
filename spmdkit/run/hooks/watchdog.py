"""Reports the phase of training to the watchdog (faults/watchdog.py), and shows the watchdog's messages."""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING, Any

from spmdkit.foundation import phase
from spmdkit.run.hooks.base import Hook

if TYPE_CHECKING:
    from spmdkit.run.run import Run

AFTER_ALL = 1000  # the time of other hooks counts as step time


def make(config: Any) -> Hook | None:
    """Returns the hook that reports steps and data reads; None if the config disables the watchdog."""
    if config.watchdog is None:
        return None
    recent: deque[float] = deque(maxlen=16)  # seconds per step, measured between waits for the device
    # The last step that was waited for, and its time by the clock of the watchdog, which stops during a pause.
    seen = [0, 0.0]

    def begin(run: Run, step: int, state: Any) -> None:
        seen[:] = step, run.watchdog.clock.now if run.watchdog is not None else 0.0
        phase.enter("data", step + 1)

    def before_step(run: Run, step: int, state: Any) -> None:
        phase.enter("step", step)

    def after_step(run: Run, step: int, state: Any, metrics: Any) -> None:
        if run.is_log_step(step) and step > seen[0] and run.watchdog is not None:
            now = run.watchdog.clock.now
            recent.append((now - seen[1]) / (step - seen[0]))
            seen[:] = step, now
            run.watchdog.step_s = statistics.median(recent)
            for line in run.watchdog.take_notices():
                run.message(line)
                run.events.write("straggler", step=step, text=line)
        phase.enter("data", step + 1)

    def end(run: Run, step: int, state: Any) -> None:
        phase.enter("end", step)

    calls: dict[str, Any] = {"begin": begin, "before_step": before_step, "after_step": after_step, "end": end}
    return Hook("watchdog", order=AFTER_ALL, **calls)  # they get a Run
