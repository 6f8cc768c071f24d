"""Communication between a process and the launcher on its machine: heartbeats, and reports of dead processes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from spmdkit.faults.heartbeat import Beat
from spmdkit.foundation.constants import BEAT_FILE, DEATHS_FILE

BEAT_BYTES = 512
"""Size of a heartbeat in the file; each heartbeat overwrites the previous one."""
MAX_BYTES = 1 << 16


class Launcher:
    """The file that the launcher reads, and the file that it writes; see launch/supervisor.py."""

    def __init__(self, descriptor: int, deaths: int | None = None):
        self._descriptor: int | None = descriptor
        self._deaths = deaths
        self._num_beats = 0

    def dead(self) -> dict[int, dict[str, Any]]:
        """Returns the dead processes: process -> `exit` and `message`."""
        if self._deaths is None:
            return {}
        with suppress(OSError, ValueError):  # half written: complete at the next read
            deaths = json.loads(os.pread(self._deaths, MAX_BYTES, 0))
            return {int(process): report for process, report in deaths.items()}
        return {}

    def write_beat(self, beat: Beat, interpreter_timeout_s: float | None) -> None:
        """Writes a heartbeat: Python runs, the phase of training, and the limit of the time without Python."""
        if self._descriptor is None:
            return
        self._num_beats += 1
        beat_report = {"number": self._num_beats, "phase": beat.phase, "does": beat.does, "step": beat.step}
        beat_report |= {"interpreter_timeout_s": interpreter_timeout_s}
        with suppress(OSError):
            os.pwrite(self._descriptor, json.dumps(beat_report).ljust(BEAT_BYTES).encode(), 0)

    def close(self) -> None:
        """Writes the last heartbeat, which marks a regular end. May be called twice."""
        self.write_beat(Beat("end", "", 0, 0.0, None), interpreter_timeout_s=None)
        opened, self._descriptor, self._deaths = (self._descriptor, self._deaths), None, None
        for descriptor in opened:
            if descriptor is not None:
                with suppress(OSError):
                    os.close(descriptor)


def launcher_of(env: Mapping[str, str]) -> Launcher | None:
    try:
        beats = os.open(env[BEAT_FILE], os.O_WRONLY | os.O_CLOEXEC)
    except (KeyError, OSError):
        return None
    deaths = None
    with suppress(KeyError, OSError):
        deaths = os.open(env[DEATHS_FILE], os.O_RDONLY | os.O_CLOEXEC)
    return Launcher(beats, deaths)
