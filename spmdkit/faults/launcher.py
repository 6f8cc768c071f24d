"""What a process tells the launcher on its machine: that Python runs in it, which the launcher cannot see otherwise."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress

from spmdkit.faults.liveness import Beat
from spmdkit.names import BEAT_FILE

BEAT_BYTES = 512
"""What is written, one over the other."""


class Launcher:
    """The file in which the launcher reads; see launch/supervise.py."""

    def __init__(self, descriptor: int):
        self._descriptor: int | None = descriptor
        self._said = 0

    def say(self, beat: Beat, interpreter_s: float | None) -> None:
        """Says that Python runs, where training stands, and for how long no Python may run."""
        if self._descriptor is None:
            return
        self._said += 1
        said = {"number": self._said, "does": beat.does, "step": beat.step, "interpreter_s": interpreter_s}
        with suppress(OSError):
            os.pwrite(self._descriptor, json.dumps(said).ljust(BEAT_BYTES).encode(), 0)

    def close(self) -> None:
        """Says nothing more, and that this is meant. May be called twice."""
        self.say(Beat("end", "", 0, 0.0, None), interpreter_s=None)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)


def launcher_of(env: Mapping[str, str]) -> Launcher | None:
    """Returns the launcher that has set its variable, or None."""
    try:
        return Launcher(os.open(env[BEAT_FILE], os.O_WRONLY | os.O_CLOEXEC))
    except (KeyError, OSError):
        return None
