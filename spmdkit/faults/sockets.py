"""TCP connections of this process on which a peer acknowledges nothing: the network to it is broken (Linux)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterable
from pathlib import Path

TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
ESTABLISHED, SYN_SENT, MIN_RETRANSMISSIONS = "01", "02", 3
"""Three retransmissions take 1.4 s without an acknowledgement (of a new connection 3 to 7 s). A few lost packets are
retransmitted once."""


def unanswered() -> bool:
    """Returns whether a connection of this process retransmits in vain; False on other systems than Linux."""
    sockets = set()
    with contextlib.suppress(OSError, ValueError, IndexError):
        for each in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed by another thread
                sockets.add(os.readlink(f"/proc/self/fd/{each}"))
        return any(retransmits(Path(table).read_text().splitlines()[1:], sockets) for table in TABLES)
    return False


def retransmits(rows: Iterable[str], sockets: Container[str]) -> bool:
    """Returns whether a connection in `sockets` (`socket:[INODE]`) retransmits in vain. `rows`: of `/proc/net/tcp`
    (Documentation/networking/proc_net_tcp.rst of Linux)."""
    for row in rows:
        _, _, _, state, _, _, count, _, _, inode = row.split()[:10]
        is_stuck = state in (ESTABLISHED, SYN_SENT) and int(count, 16) >= MIN_RETRANSMISSIONS
        if is_stuck and f"socket:[{inode}]" in sockets:
            return True
    return False
