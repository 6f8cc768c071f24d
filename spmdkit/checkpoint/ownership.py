"""The ownership of a run: three tokens, each with a different scope.

run_lock  (run_directory.py)  an flock on the run directory; ends with its process; excludes a second run
Fence     (this file)         the id of the attempt, stored in the directory; stops writes of an earlier attempt
Lease     (lease.py)          the equivalent for a folder of a bucket, which has no locks

Without a fence, a process of an earlier attempt that was suspended and resumes, or a run after its folder was moved,
would continue to write. So each attempt stores its id in the directory and checks it before each save and event, and
before metrics lines at most ten times per second.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.foundation import files, run_status
from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.timeouts import RUN_DIRECTORY_POLL_S

ATTEMPT_FILE = "attempt.json"


@dataclasses.dataclass
class Fence:
    """The right of one attempt to write to a run directory.

    `seen`: the file content at the last successful check, and the monotonic time of that check in seconds.
    """

    directory: Path
    attempt: str
    seen: tuple[bytes | None, float] = (None, float("-inf"))

    def is_owner(self) -> bool:
        """Returns whether no other attempt has claimed the directory. Reads one small file."""
        content, before = _content(self.directory), self.seen[0]
        is_owner = content is not None and content == before
        if not is_owner:
            is_owner = parse_owner(content).get("attempt", self.attempt) == self.attempt
        self.seen = (content, time.monotonic()) if is_owner else (None, float("-inf"))
        return is_owner

    def check(self, every_s: float = 0.0) -> None:
        """Rejects writes of an attempt after a later attempt has claimed the directory.

        Args:
            every_s: maximum age of a previous check that is still valid. A process that was suspended for longer checks
                again.

        Raises:
            ConfigError: another run owns the directory; the message names its process, host and time.
        """
        if time.monotonic() - self.seen[1] >= every_s and not self.is_owner():
            raise ConfigError(
                f"{self.directory} belongs to another run now, of {last_owner(self.directory)}. One run at a time may "
                "write to it, so this one ends and writes nothing more. Set run_dir to another folder, or end the "
                "other run."
            )


def claim(directory: Path, attempt: str | None = None) -> Fence:
    """Assigns the directory to an attempt, by default a new one, and returns its fence. Called by the process that
    holds the lock. Raises ConfigError if the directory cannot be written."""
    fence = Fence(directory, attempt or secrets.token_hex(8))
    files.write_json(directory / ATTEMPT_FILE, {"attempt": fence.attempt} | this_owner())
    return fence


def wait_for_claim(directory: Path, attempt: str, timeout_s: float) -> bool:
    """Returns whether this process sees the claim of process 0 in `directory` before the timeout. Network file systems
    may delay it."""
    seen = lambda: parse_owner(_content(directory)).get("attempt") == attempt
    return Deadline(timeout_s).wait_for(seen, RUN_DIRECTORY_POLL_S)


def this_owner() -> dict[str, Any]:
    """Returns the description of this process as an owner, in JSON values."""
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return run_status.this_process() | {"since": since}


def describe_owner(owner: Mapping[str, Any]) -> str:
    """Returns `process 12 on host since ...`."""
    is_complete = {"pid", "host", "since"} <= owner.keys()
    return f"process {owner['pid']} on {owner['host']} since {owner['since']}" if is_complete else "another process"


def last_owner(directory: Path) -> str:
    """Returns `process 12 on host since ...` of the last attempt."""
    return describe_owner(parse_owner(_content(directory)))


def _content(directory: Path) -> bytes | None:
    """Returns the content of the file. Opens it each time, so that a network file system checks for changes."""
    try:
        return files.read_regular(f"{directory}/{ATTEMPT_FILE}", 4096)
    except OSError:
        return None


def parse_owner(content: bytes | None) -> dict[str, Any]:
    """Returns the stored owner; an empty dict, which means no other run, if the file is missing or not JSON."""
    try:
        owner = json.loads(content or b"")
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}
