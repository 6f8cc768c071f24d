"""That a run is going on: said at its start, kept at each step, so that one that leaves without a word is not taken for one that is done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from spmdkit import attempt
from spmdkit.faults.outcome import quiet_callbacks
from spmdkit.names import STEP_FILE


def note_running(run: Any, step: int) -> attempt.StepMark:
    """Returns the mark of the steps to come, after `running` is written; tells of the start before, where that one did not say how it ended."""
    quiet_callbacks()
    paths = [run.directory / attempt.LAST_STEP] if run.cluster.is_main else []
    if run.cluster.is_main:
        left = attempt.unfinished(run.directory)
        if left is not None and not left.alive:
            run.events.write("left", step=left.step, restored=step)
            run.message(f"note: {left.told()}")
        run.events.write(attempt.RUNNING, **attempt.running(step))
    if path := os.environ.get(STEP_FILE):
        paths.append(Path(path))
    mark = attempt.StepMark(paths)
    mark.at(step)
    if path:
        attempt.tell_directory(Path(path), run.directory)
    return mark
