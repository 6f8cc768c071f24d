"""Callbacks of the watchdog and of signals, called from their threads."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from spmdkit.checkpoint import Checkpoints
from spmdkit.faults import exit_with_message
from spmdkit.foundation import files, phase, redact
from spmdkit.foundation.timeouts import INPUT_GRACE_S
from spmdkit.run.hooks.base import RunView


def record_fault(run: RunView, code: int, text: str, stacks: str) -> None:
    """Writes the event `fault`, and the stacks to `logs/stacks.txt`."""
    run.events.write("fault", step=run.step, code=code, error=text[:500])
    if stacks:
        folder = run.directory / "logs"
        folder.mkdir(exist_ok=True)
        files.write_text(folder / "stacks.txt", redact.redact_text(f"{text}\n\n{stacks}\n"))


def exit_on_stuck_callback(run: RunView, code: int, text: str) -> None:
    """Ends the process: its devices wait indefinitely for the device with the failed callback."""
    record_fault(run, code, text, "")
    exit_with_message(code, text)


def newest_on_disk(checkpoints: Checkpoints | None) -> str:
    """Returns a sentence about the newest checkpoint, without waiting for one that is being written."""
    latest = checkpoints.last_committed() if checkpoints is not None else None
    return f"The newest checkpoint is of step {latest}." if latest else "No checkpoint was saved yet."


def end_stalled_input(
    num_processes: int, give_up_input: Callable[[], None], newest: Callable[[], str], number: int
) -> None:
    """Ends the run after a stop request while its data source is blocked. Runs in a separate thread.

    A run of one process saves its state. With several processes, the others are inside the step that this one misses.
    """
    requested_at = time.monotonic()
    while (place := phase.current_phase()).phase != "end":
        time.sleep(0.1)
        waited_s = time.monotonic() - max(place.since, requested_at)
        if place.phase != "data" or waited_s < INPUT_GRACE_S:
            continue
        if num_processes == 1:
            give_up_input()
            return
        exit_with_message(
            128 + number,
            f"stopped by {signal.Signals(number).name}, and train_data has not returned the batch of step {place.step} "
            f"for {time.monotonic() - place.since:.0f} s. The other processes are inside that step, so nothing newer "
            f"can be saved. {newest()} Start the same command again.",
        )
