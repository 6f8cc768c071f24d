"""The addresses on which processes listen, read from the kernel (Linux), and the address of this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
LISTEN = "0A"
"""State of a socket in /proc/net/tcp (Linux, include/net/tcp_states.h)."""


def with_its_children(pid: int) -> list[int]:
    """Returns a process and all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in with_its_children(int(child)))]


def listening(pids: Iterable[int]) -> list[tuple[Address, int]]:
    """Returns (address, port) of every TCP socket on which one of the processes listens."""
    opened = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):  # closed in the meantime
                opened.add(os.readlink(descriptor))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTEN and f"socket:[{inode}]" in opened:
                address, port = local.split(":")
                words = bytes.fromhex(address)  # each four bytes in this machine's byte order: the last byte first
                turned = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                ip = ipaddress.ip_address(turned)
                found.append((getattr(ip, "ipv4_mapped", None) or ip, int(port, 16)))
    return found


def own_address() -> str | None:
    """Returns the address by which this machine reaches other machines, or None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect(("192.0.2.99", 9))
        except OSError:
            return None
        return way.getsockname()[0]
