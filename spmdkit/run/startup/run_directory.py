"""The start of an attempt in its run directory: process 0 locks it, the attempt claims it, all processes check that
they see the same folder, and a marker file shows that the attempt is running."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path

from spmdkit.checkpoint import run_lock
from spmdkit.checkpoint.ownership import Fence, claim, wait_for_claim
from spmdkit.cluster import Cluster
from spmdkit.errors import ConfigError
from spmdkit.faults.error_mapping import quiet_callbacks
from spmdkit.foundation import files, run_status
from spmdkit.foundation.constants import STEP_FILE
from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.timeouts import RUN_DIRECTORY_POLL_S, RUN_DIRECTORY_VISIBLE_S
from spmdkit.run.hooks.base import RunView

WRITTEN_BY_OTHERS = ("report.html",)
"""Files that `spmdkit report` writes while a run is active."""


def claim_directory(cluster: Cluster, directory: Path, stack: ExitStack, shared: bool = True) -> Fence:
    """Returns the fence of the directory, which is locked until `stack` is closed.

    Args:
        shared: all processes must see the same folder. Otherwise a process without that folder claims a local one.

    Raises:
        ConfigError: another run holds it, it cannot be written, or processes see different folders.
    """
    claimed = list[Fence]()

    def lock() -> dict[str, str]:
        if cluster.is_main:
            stack.enter_context(run_lock(directory))
            claimed.append(claim(directory))
            files.remove_unfinished(directory, others=WRITTEN_BY_OTHERS)
        return {}

    if cluster.num_processes == 1:
        lock()
        return claimed[0]
    cluster.same_everywhere("the run directory", lock)
    fence = Fence(directory, cluster.from_main("attempt", lambda: claimed[0].attempt))

    def seen() -> dict[str, str]:
        if not shared:
            _claim_own(directory, fence.attempt, stack)
            return {}
        if wait_for_claim(directory, fence.attempt, RUN_DIRECTORY_VISIBLE_S):
            return {"attempt.json": fence.attempt}
        return {"attempt.json": f"not to be seen in {directory} of {socket.gethostname()}"}

    cluster.same_everywhere("the run directory", seen, repair=SHARED)
    return fence


def _claim_own(directory: Path, attempt: str, stack: ExitStack) -> None:
    """Returns when the folder belongs to this attempt: that of process 0, or a local one, locked and claimed."""
    deadline = Deadline(RUN_DIRECTORY_VISIBLE_S)
    while not wait_for_claim(directory, attempt, 0):
        try:
            stack.enter_context(run_lock(directory))
        except ConfigError:  # held by process 0 with a claim that is not visible yet, or by another run
            if deadline.expired:
                raise
            time.sleep(RUN_DIRECTORY_POLL_S)
        else:
            claim(directory, attempt)


SHARED = (
    "A run has one directory, on a disk that all hosts share. Set run_dir to a folder of such a disk, or "
    "checkpoint.directory to a bucket."
)


def note_running(run: RunView, step: int) -> run_status.StepMark:
    """Writes the event `running`. Returns the marker file with the last step: without an exit event, a run is then not
    mistaken for a finished one. Reports a previous attempt that ended without one."""
    quiet_callbacks()
    paths = [run.directory / run_status.LAST_STEP] if run.cluster.is_main else []
    if run.cluster.is_main:
        previous = run_status.unfinished(run.directory)
        if previous is not None and not previous.alive:
            run.events.write("exited", step=previous.step, restored=step)
            run.message(f"note: {previous.message()}")
        run.events.write(run_status.RUNNING, **run_status.running(step))
    if path := os.environ.get(STEP_FILE):
        paths.append(Path(path))
    mark = run_status.StepMark(paths)
    mark.at(step)
    if path:
        run_status.write_directory(Path(path), run.directory)
    return mark
