"""Callbacks of the watchdog and of signals, called from their threads: they record the end of a run, and end a run
with a hanging data source."""

from __future__ import annotations

import functools
import signal
import time
from typing import TYPE_CHECKING

from spmdkit.faults import leave_with
from spmdkit.foundation import files, phase, redact
from spmdkit.foundation.timeouts import INPUT_GRACE_S

if TYPE_CHECKING:
    from spmdkit.run.run import Run


def connect(run: Run) -> None:
    """Connects the watchdog and the signals to a run."""
    if run.watchdog is not None:
        run.watchdog.record_end = functools.partial(record_fault, run)
        run.watchdog.newest = functools.partial(newest_on_disk, run)
    if run.signals is not None:
        run.signals.then = functools.partial(end_stalled_input, run)


def record_fault(run: Run, code: int, text: str, stacks: str) -> None:
    """Writes the event `fault`, and the stacks to `logs/stacks.txt`."""
    run.events.write("fault", step=run.step, code=code, error=text[:500])
    if stacks:
        folder = run.directory / "logs"
        folder.mkdir(exist_ok=True)
        files.write_text(folder / "stacks.txt", redact.in_text(f"{text}\n\n{stacks}\n"))


def leave_stuck_callback(run: Run, code: int, text: str) -> None:
    """Ends the process: its devices wait indefinitely for the one with the failed callback."""
    record_fault(run, code, text, "")
    leave_with(code, text)


def newest_on_disk(run: Run) -> str:
    """Returns a sentence about the newest checkpoint, without waiting for one that is being written."""
    latest = run.checkpoints.last_committed() if run.checkpoints is not None else None
    return f"The newest checkpoint is of step {latest}." if latest else "No checkpoint was saved yet."


def end_stalled_input(run: Run, number: int) -> None:
    """Ends the run after a stop request although its data source does not return a batch. Runs in a separate thread.

    A run of one process saves its state. Of several processes, the others are inside the step that this one misses.
    """
    requested_at = time.monotonic()
    while (place := phase.current_phase()).phase != "end":
        time.sleep(0.1)
        waited_s = time.monotonic() - max(place.since, requested_at)
        if place.phase != "data" or waited_s < INPUT_GRACE_S:
            continue
        if run.cluster.num_processes == 1:
            run.give_up_input()
            return
        leave_with(
            128 + number,
            f"stopped by {signal.Signals(number).name}, and train_data has not given the batch of step {place.step} "
            f"for "
            f"{time.monotonic() - place.since:.0f} s. The other processes are inside that step, so nothing newer can "
            f"be saved. "
            f"{newest_on_disk(run)} Start the same command again.",
        )
