"""What the watchdog and a signal do with a run, from their own threads: take down that it ends, and outlive a source of
data that hangs."""

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
    """Lets the watchdog and the signals of a run know it."""
    if run.watchdog is not None:
        run.watchdog.record_end = functools.partial(take_down, run)
        run.watchdog.newest = functools.partial(newest_on_disk, run)
    if run.signals is not None:
        run.signals.then = functools.partial(outlive_input, run)


def take_down(run: Run, code: int, text: str, stacks: str) -> None:
    """Writes that the watchdog ends this process, and the stacks into `logs/stacks.txt`."""
    run.events.write("fault", step=run.step, code=code, error=text[:500])
    if stacks:
        folder = run.directory / "logs"
        folder.mkdir(exist_ok=True)
        files.write_text(folder / "stacks.txt", redact.in_text(f"{text}\n\n{stacks}\n"))


def leave_stuck_callback(run: Run, code: int, text: str) -> None:
    """Ends the process, whose devices wait for the one whose callback has raised."""
    take_down(run, code, text, "")
    leave_with(code, text)


def newest_on_disk(run: Run) -> str:
    """Returns a sentence on the newest checkpoint, without waiting for one that is being written."""
    latest = run.checkpoints.last_committed() if run.checkpoints is not None else None
    return f"The newest checkpoint is of step {latest}." if latest else "No checkpoint was saved yet."


def outlive_input(run: Run, number: int) -> None:
    """After a request to stop, in a thread of its own: a source of data that gives nothing must not keep the run from
    its end.

    A run of one process saves its state. Of several processes, the others are inside the step that this one misses.
    """
    asked = time.monotonic()
    while (place := phase.current_phase()).phase != "end":
        time.sleep(0.1)
        waited_s = time.monotonic() - max(place.since, asked)
        if place.phase != "data" or waited_s < INPUT_GRACE_S:
            continue
        if run.cluster.num_processes == 1:
            run.give_up_input()
            return
        leave_with(
            128 + number,
            f"stopped by {signal.Signals(number).name}, and train_data has not given the batch of step {place.step} for "
            f"{time.monotonic() - place.since:.0f} s. The other processes are inside that step, so nothing newer can be saved. "
            f"{newest_on_disk(run)} Start the same command again.",
        )
