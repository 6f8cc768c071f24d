"""That a run is going on: said at its start, kept at each step, so that one that leaves without a word is not taken for
one that is done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from spmdkit.faults.error_mapping import quiet_callbacks
from spmdkit.foundation import run_status
from spmdkit.foundation.constants import STEP_FILE

if TYPE_CHECKING:
    from spmdkit.run.run import Run


def note_running(run: Run, step: int) -> run_status.StepMark:
    """Returns the mark of the steps to come, after `running` is written; tells of the start before, where that one did
    not say how it ended."""
    quiet_callbacks()
    paths = [run.directory / run_status.LAST_STEP] if run.cluster.is_main else []
    if run.cluster.is_main:
        left = run_status.unfinished(run.directory)
        if left is not None and not left.alive:
            run.events.write("exited", step=left.step, restored=step)
            run.message(f"note: {left.told()}")
        run.events.write(run_status.RUNNING, **run_status.running(step))
    if path := os.environ.get(STEP_FILE):
        paths.append(Path(path))
    mark = run_status.StepMark(paths)
    mark.at(step)
    if path:
        run_status.tell_directory(Path(path), run.directory)
    return mark
