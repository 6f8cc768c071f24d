"""`MembershipUpdate`: the membership of a generation, from a launcher to its processes, in a file without a name that
it passes down open; and what they say back.

launcher                                               process
a member is dead: number 2, members [0, 1, 4, 3] --->  leaves what it does, and its backend
                                              <---     ready 2
all are ready, the service is up: service        --->  joins as the rank at which its own number stands
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from spmdkit.foundation.constants import GENERATION, MEMBER, MEMBERSHIP_FILE, READY_FILE

ORDER_BYTES = 1 << 14
"""What is written, one over the other."""


@dataclass(frozen=True)
class MembershipUpdate:
    """One generation.

    Attributes:
        number: counted from 1, the start of all.
        members: the process of each rank, by the number that the launcher gave it.
        service: `host:port` of the coordination service of this generation; empty until all members are ready.
        planned: no process has died: all continue to a step that they agree on.
        overrides: `key=value` overrides for the config of this generation.
        adopted: (number of a standby, the process that it is from now on).
        why: for people.
    """

    number: int
    members: tuple[int, ...]
    service: str = ""
    planned: bool = False
    overrides: tuple[str, ...] = ()
    why: str = ""
    adopted: tuple[tuple[int, int], ...] = ()

    def process_of(self, number: int) -> int:
        """Returns which process one is that was started with `number`: another one where it was a standby."""
        return dict(self.adopted).get(number, number)

    def text(self) -> str:
        """Returns it as it is written."""
        return json.dumps(asdict(self)).ljust(ORDER_BYTES)


def parse_update(text: str | bytes) -> MembershipUpdate | None:
    """Returns the order of `MembershipUpdate.text`, None where it is half written or none."""
    try:
        values: dict[str, Any] = json.loads(text)
        adopted = tuple((standby, process) for standby, process in values["adopted"])
        return MembershipUpdate(
            **{
                **values,
                "members": tuple(values["members"]),
                "overrides": tuple(values["overrides"]),
                "adopted": adopted,
            }
        )
    except (ValueError, TypeError, KeyError):
        return None


class MembershipFiles:
    """The files of one process; `open_membership_files` opens them.

    Attributes:
        member: the number that the launcher gave to this process; below 0: a standby, which waits to become another
            one.
        born: the number of the generation that it was started for.
    """

    def __init__(self, order: int, ready: int, member: int, born: int):
        self._order, self._ready = order, ready
        self.member, self.born = member, born

    def read(self) -> MembershipUpdate | None:
        """Returns the newest order."""
        with suppress(OSError):
            return parse_update(os.pread(self._order, ORDER_BYTES, 0))
        return None

    def say_ready(self, number: int) -> None:
        """Reports that this process has left its backend, and can join generation `number`."""
        with suppress(OSError):
            os.pwrite(self._ready, f"{number:20d}\n".encode(), 0)


def parse_ready(content: bytes) -> int:
    """Returns the generation that a process is ready for, 0 where it has reported nothing."""
    try:
        return int(content[:21])
    except ValueError:
        return 0


def open_membership_files(env: Mapping[str, str]) -> MembershipFiles | None:
    """Returns the files that a launcher has named, None where it gives no orders."""
    try:
        order = os.open(env[MEMBERSHIP_FILE], os.O_RDONLY | os.O_CLOEXEC)
        ready = os.open(env[READY_FILE], os.O_WRONLY | os.O_CLOEXEC)
        return MembershipFiles(order, ready, int(env[MEMBER]), int(env[GENERATION]))
    except (KeyError, OSError, ValueError):
        return None
