"""`MembershipUpdate`: the membership of a generation. A launcher sends it to its processes in an unnamed file, and they
reply.

launcher                                               process
a member is dead: number 2, members [0, 1, 4, 3] --->  aborts its work, closes its backend
                                              <---     ready 2
all are ready, the service is up: service        --->  joins; its rank is the index of its number in `members`
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from spmdkit.foundation.constants import GENERATION, MEMBER, MEMBERSHIP_FILE, READY_FILE

UPDATE_BYTES = 1 << 14
"""Size of an update in the file; each update overwrites the previous one."""


@dataclass(frozen=True)
class MembershipUpdate:
    """One generation."""

    number: int  # counted from 1, the initial start
    members: tuple[int, ...]  # the process of each rank, by the number that the launcher assigned
    service: str = ""  # `host:port` of its coordination service; empty until all members are ready
    planned: bool = False  # no process has died: all continue to an agreed step
    overrides: tuple[str, ...] = ()  # `key=value` overrides for the config of this generation
    why: str = ""  # the reason, for messages
    adopted: tuple[tuple[int, int], ...] = ()  # (number of a standby, number of the process that it replaces)

    def process_of(self, number: int) -> int:
        """Returns the current number of the process that was started with `number`; a standby gets a new one."""
        return dict(self.adopted).get(number, number)

    def text(self) -> str:
        return json.dumps(asdict(self)).ljust(UPDATE_BYTES)


def parse_update(text: str | bytes) -> MembershipUpdate | None:
    """Returns the update written by `MembershipUpdate.text`, None if it is incomplete or absent."""
    try:
        values: dict[str, Any] = json.loads(text)
        values["adopted"] = tuple((standby, process) for standby, process in values["adopted"])
        values |= {name: tuple(values[name]) for name in ("members", "overrides")}
        return MembershipUpdate(**values)
    except (ValueError, TypeError, KeyError):
        return None


class MembershipFiles:
    """The files of a process; `member`: its number, below 0 for a standby; `born`: its first generation."""

    def __init__(self, update: int, ready: int, member: int, born: int):
        self._update, self._ready = update, ready
        self.member, self.born = member, born

    def read(self) -> MembershipUpdate | None:
        with suppress(OSError):
            return parse_update(os.pread(self._update, UPDATE_BYTES, 0))
        return None

    def report_ready(self, number: int) -> None:
        """Reports that this process has closed its backend, and can join generation `number`."""
        with suppress(OSError):
            os.pwrite(self._ready, f"{number:20d}\n".encode(), 0)


def parse_ready(content: bytes) -> int:
    """Returns the generation that a process is ready for, 0 if it has reported none."""
    try:
        return int(content[:21])
    except ValueError:
        return 0


def open_membership_files(env: Mapping[str, str]) -> MembershipFiles | None:
    """Returns the files that a launcher has named, None if it sends no updates."""
    try:
        update = os.open(env[MEMBERSHIP_FILE], os.O_RDONLY | os.O_CLOEXEC)
        ready = os.open(env[READY_FILE], os.O_WRONLY | os.O_CLOEXEC)
        return MembershipFiles(update, ready, int(env[MEMBER]), int(env[GENERATION]))
    except (KeyError, OSError, ValueError):
        return None
