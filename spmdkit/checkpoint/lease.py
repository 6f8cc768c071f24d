"""`Lease`: ownership of a folder in a bucket. A bucket has no locks, so the owner renews a lease.

    run/lease.json       the attempt that owns the folder, and its process
    run/alive-<attempt>  a number that this attempt increments every `LEASE_RENEW_S`

A new run takes over a lease if its process is known to have exited, if it was released, or if its number is unchanged
for `LEASE_STALE_S` on the monotonic clock of the new run. Two runs that take over together both write, and then read
which write was last. Safety does not depend on this: a run checks that it owns the lease before each commit.

Source: Gray and Cheriton, "Leases" (1989); Kleppmann, "How to do distributed locking" (2016) on fencing tokens.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from spmdkit.checkpoint import location, ownership
from spmdkit.checkpoint.object_store import Remote
from spmdkit.errors import ConfigError, UnreachableError
from spmdkit.foundation import run_status
from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.timeouts import LEASE_POLL_S, LEASE_RENEW_S, LEASE_SETTLE_S, LEASE_STALE_S


class Lease:
    """The right of an attempt to write to a folder in a bucket, from `acquire` until `release`. For process 0."""

    def __init__(
        self,
        directory: Remote,
        attempt: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        print_line: Callable[[str], None] = lambda line: None,
    ):
        self.directory, self.attempt = directory, attempt
        self._clock, self._sleep, self._print_line = clock, sleep, print_line
        self._folder = directory / location.RUN_FOLDER
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> Self:
        """Returns when this attempt owns the folder.

        Raises:
            ConfigError: another run owns the folder and renews its lease.
            Unreachable: the bucket cannot be read or written.
        """
        before = self._read()
        if before and not run_status.is_gone(before):
            self._wait_until_stale(before)
        self._claim()
        self._sleep(LEASE_SETTLE_S)
        if not self.is_owner():
            raise self._in_use(self._read())
        if before:
            self._folder.remove([f"alive-{before['attempt']}"])
        self._thread = threading.Thread(target=self._renew_loop, name="lease", daemon=True)
        self._thread.start()
        return self

    def _claim(self) -> None:
        self._renew(0)
        lease = {"attempt": self.attempt} | ownership.this_owner()
        (self._folder / "lease.json").write_bytes(json.dumps(lease).encode())

    def _wait_until_stale(self, before: dict[str, Any]) -> None:
        beat = self._counter(before)
        if beat is None:  # released, or never started
            return
        self._print_line(
            f"{self.directory} was last of {ownership.describe_owner(before)}; waiting up to {LEASE_STALE_S:g} s to "
            "see whether it lives"
        )
        for _ in Deadline(LEASE_STALE_S, self._clock, self._sleep).polls(LEASE_POLL_S):
            if self._counter(before) != beat or self._read().get("attempt") != before["attempt"]:
                raise self._in_use(self._read())

    def is_owner(self) -> bool:
        """Returns whether no other attempt has acquired the folder. Reads one small object."""
        return self._read().get("attempt") == self.attempt

    def release(self) -> None:
        """Releases the folder, so that the next attempt does not wait."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(LEASE_RENEW_S)
        with contextlib.suppress(UnreachableError):
            self._folder.remove([f"alive-{self.attempt}"])

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _renew_loop(self) -> None:
        number = 0
        while not self._ended.wait(LEASE_RENEW_S):
            number += 1
            with contextlib.suppress(UnreachableError):  # the next save reports it
                self._renew(number)

    def _renew(self, number: int) -> None:
        (self._folder / f"alive-{self.attempt}").write_bytes(b"%d" % number)

    def _counter(self, of: dict[str, Any]) -> bytes | None:
        try:
            return (self._folder / f"alive-{of['attempt']}").read_bytes()
        except FileNotFoundError:
            return None

    def _read(self) -> dict[str, Any]:
        """Returns the stored lease; an empty dict if there is none, or if it was not written by spmdkit."""
        try:
            lease = ownership.parse_owner((self._folder / "lease.json").read_bytes())
        except FileNotFoundError:
            return {}
        return lease if isinstance(lease.get("attempt"), str) else {}

    def _in_use(self, by: dict[str, Any]) -> ConfigError:
        return ConfigError(
            f"{self.directory} is in use by {ownership.describe_owner(by)}. One run at a time may write to it. "
            "Wait for that run, end it, or set checkpoint.directory to another folder."
        )
