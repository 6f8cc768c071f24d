"""Taking a run's directory: locked by process 0, claimed for this attempt, and the same folder for all processes."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

from spmdkit.checkpoint import RunLock
from spmdkit.checkpoint.fence import Fence, claim, wait_to_see
from spmdkit.cluster import Cluster

SEEN_WITHIN_S = 5.0
"""How long another process may need to see a file that process 0 has written: NFS keeps what it knows of a folder for seconds."""


def take_directory(cluster: Cluster, directory: Path, stack: ExitStack) -> Fence:
    """Returns the fence of the directory, which is locked until `stack` is closed.

    Raises:
        ConfigError: another run holds it; it cannot be written; or processes see different folders under its name, said on each of them.
    """
    claimed = list[Fence]()

    def lock() -> dict[str, str]:
        if cluster.is_main:
            stack.enter_context(RunLock(directory))
            claimed.append(claim(directory))
        return {}

    if cluster.num_processes == 1:
        lock()
        return claimed[0]
    cluster.same_everywhere("the run directory", lock)
    if cluster.is_main:
        cluster.put("attempt", claimed[0].attempt)
    fence = Fence(directory, cluster.get("attempt"))

    def seen() -> dict[str, str]:
        if wait_to_see(directory, fence.attempt, SEEN_WITHIN_S):
            return {"attempt.json": fence.attempt}
        return {"attempt.json": f"not to be seen in {directory} of {socket.gethostname()}"}

    cluster.same_everywhere("the run directory", seen, repair=SHARED)
    return fence


SHARED = "A run has one directory, on a disk that all hosts share. Set run_dir to a folder of such a disk."
