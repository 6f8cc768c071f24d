"""Taking ownership of a run directory: process 0 locks it, this attempt claims it, and all processes see the same
folder."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from pathlib import Path

from spmdkit.checkpoint import RunLock
from spmdkit.checkpoint.ownership import Fence, claim, wait_for_claim
from spmdkit.cluster import Cluster
from spmdkit.errors import ConfigError
from spmdkit.foundation import files
from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.timeouts import RUN_DIRECTORY_POLL_S, RUN_DIRECTORY_VISIBLE_S

WRITTEN_BY_OTHERS = ("report.html",)
"""Files that `spmdkit report` writes while a run is active."""


def take_directory(cluster: Cluster, directory: Path, stack: ExitStack, shared: bool = True) -> Fence:
    """Returns the fence of the directory, which is locked until `stack` is closed.

    Args:
        shared: all processes must see one folder. Otherwise each process that does not see that of process 0 takes its
            own.

    Raises:
        ConfigError: another run holds it; it cannot be written; or processes see different folders under its name,
            reported on each of them.
    """
    claimed = list[Fence]()

    def lock() -> dict[str, str]:
        if cluster.is_main:
            stack.enter_context(RunLock(directory))
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
            _take_own(directory, fence.attempt, stack)
            return {}
        if wait_for_claim(directory, fence.attempt, RUN_DIRECTORY_VISIBLE_S):
            return {"attempt.json": fence.attempt}
        return {"attempt.json": f"not to be seen in {directory} of {socket.gethostname()}"}

    cluster.same_everywhere("the run directory", seen, repair=SHARED)
    return fence


def _take_own(directory: Path, attempt: str, stack: ExitStack) -> None:
    """Returns when the folder belongs to this attempt: that of process 0, visible here, or one of this host, locked and
    claimed now.

    Raises:
        ConfigError: another run holds it.
    """
    deadline = Deadline(RUN_DIRECTORY_VISIBLE_S)
    while not wait_for_claim(directory, attempt, 0):
        try:
            stack.enter_context(RunLock(directory))
        except ConfigError:  # held by process 0, whose claim is not visible yet, or by another run
            if deadline.expired:
                raise
            time.sleep(RUN_DIRECTORY_POLL_S)
        else:
            claim(directory, attempt)


SHARED = (
    "A run has one directory, on a disk that all hosts share. Set run_dir to a folder of such a disk, or "
    "checkpoint.directory to a bucket."
)
