"""Which attempt a run's directory belongs to: a lock keeps others out, a fence keeps those out who were in it before.

The lock goes with its process, and with the folder that was locked. A process of an earlier attempt that wakes up, or a run whose folder was
moved away, would still write. So each attempt has an id; it lies in the folder, and whoever writes looks whether it is still its own.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import secrets
import socket
import time
from pathlib import Path

from spmdkit import files
from spmdkit.errors import ConfigError

ATTEMPT_FILE = "attempt.json"
LOOK_EVERY_S = 0.05


@dataclasses.dataclass(frozen=True)
class Fence:
    """The right of one attempt to write into a run's directory."""

    directory: Path
    attempt: str

    def is_ours(self) -> bool:
        """Returns whether no other attempt has taken the directory. Costs the reading of one small file."""
        return _read(self.directory).get("attempt", self.attempt) == self.attempt

    def check(self) -> None:
        """Refuses to write for an attempt that has been followed by another.

        Raises:
            ConfigError: another run has the directory, named by its process, host and time.
        """
        if not self.is_ours():
            raise ConfigError(
                f"{self.directory} belongs to another run by now, of {owner(self.directory)}. "
                "One run at a time may write to it, so this one ends and writes nothing more. Set run_dir to another folder, or end the other run."
            )


def claim(directory: Path, attempt: str | None = None) -> Fence:
    """Returns the fence of an attempt, by default a new one, to which the directory belongs from now on. For the process that holds the lock.

    Raises:
        ConfigError: it cannot be written.
    """
    fence = Fence(directory, attempt or secrets.token_hex(8))
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    files.write_json(
        directory / ATTEMPT_FILE,
        {"attempt": fence.attempt, "pid": os.getpid(), "host": socket.gethostname(), "since": since},
    )
    return fence


def wait_to_see(directory: Path, attempt: str, timeout_s: float) -> bool:
    """Returns whether this process sees in `directory` what process 0 has claimed; a file system of a network may need a moment."""
    deadline = time.monotonic() + timeout_s
    while _read(directory).get("attempt") != attempt:
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def owner(directory: Path) -> str:
    """Returns `process 12 on host since ...` of the last attempt."""
    found = _read(directory)
    known = {"pid", "host", "since"} <= found.keys()
    return f"process {found['pid']} on {found['host']} since {found['since']}" if known else "another process"


def _read(directory: Path) -> dict[str, str]:
    """Returns what lies there; nothing where it is gone or no JSON, which is no other run."""
    try:
        found = json.loads((directory / ATTEMPT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
