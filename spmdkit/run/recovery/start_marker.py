"""The mark of a running attempt: the event `running` at its start, and its last step in a file. A run that exits
without an exit event is then not mistaken for a finished one."""

from __future__ import annotations

import os
from pathlib import Path

from spmdkit.faults.error_mapping import quiet_callbacks
from spmdkit.foundation import run_status
from spmdkit.foundation.constants import STEP_FILE
from spmdkit.run.hooks.base import RunView


def note_running(run: RunView, step: int) -> run_status.StepMark:
    """Writes the event `running` and returns the mark of the steps. Reports a previous attempt that ended without an
    exit event."""
    quiet_callbacks()
    paths = [run.directory / run_status.LAST_STEP] if run.cluster.is_main else []
    if run.cluster.is_main:
        left = run_status.unfinished(run.directory)
        if left is not None and not left.alive:
            run.events.write("exited", step=left.step, restored=step)
            run.message(f"note: {left.message()}")
        run.events.write(run_status.RUNNING, **run_status.running(step))
    if path := os.environ.get(STEP_FILE):
        paths.append(Path(path))
    mark = run_status.StepMark(paths)
    mark.at(step)
    if path:
        run_status.write_directory(Path(path), run.directory)
    return mark
