"""The last start of a run: its last step, and whether it recorded how it ended. Available also if its process was
killed.

`events.jsonl` holds `running` from each start, and `stopped`, `preempted` or `fault` at its end. `last_step` holds the
last dispatched step, in a memory page that the kernel retains for a dead process. A run that ended by `os._exit(0)` has
the exit code of a finished one; these two files distinguish them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spmdkit.foundation.constants import NAMELESS
from spmdkit.foundation.files import json_object

EVENTS, LAST_STEP = "events.jsonl", "last_step"
RUNNING, ENDS = "running", ("stopped", "preempted", "fault")

_WIDTH = 20


class StepMark:
    """The number of the last dispatched step, in one or more files; writing it costs less than a microsecond and waits
    for no disk.

    A file that cannot be mapped is ignored: its content is for a message only.
    """

    def __init__(self, paths: Iterable[Path]):
        self._maps = [opened for path in paths if (opened := _mapped(path)) is not None]

    def at(self, step: int) -> None:
        """Records that `step` was dispatched."""
        for each in self._maps:
            each[:_WIDTH] = b"%20d" % step

    def close(self) -> None:
        """Closes the files. May be called twice."""
        maps, self._maps = self._maps, []
        for each in maps:
            each.close()


def _mapped(path: Path) -> mmap.mmap | None:
    try:
        follow = 0 if str(path).startswith(NAMELESS) else os.O_NOFOLLOW
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | follow | os.O_CLOEXEC, 0o640)
        try:
            os.ftruncate(descriptor, _WIDTH + 1)
            os.pwrite(descriptor, b"\n", _WIDTH)
            return mmap.mmap(descriptor, _WIDTH + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None


def last_step(path: Path) -> int | None:
    """Returns the step of a `StepMark` file, or None without one."""
    try:
        return step_of(path.read_bytes())
    except OSError:
        return None


def step_of(content: bytes) -> int | None:
    """Returns the step in the content of a `StepMark` file, or None."""
    try:
        return int(content[:64].partition(b"\n")[0])
    except ValueError:
        return None


_DIRECTORY_AT = 64


def write_directory(path: Path, directory: Path) -> None:
    """Writes the directory of the run behind a `StepMark`, for the reader of its file (`launch`)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, os.fsencode(directory) + b"\n", _DIRECTORY_AT)
        finally:
            os.close(descriptor)


def directory_of(content: bytes) -> Path | None:
    """Returns the directory of the run that has written `content`, or None if it is not written yet."""
    name, ended, _ = content[_DIRECTORY_AT:].partition(b"\n")
    return Path(os.fsdecode(name)) if ended and name else None


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A start of a run without a recorded end.

    Attributes:
        step: the last dispatched step, as far as known.
        alive: it is running, on this machine; None: unknown, since it ran on another.
    """

    step: int
    pid: int
    host: str
    alive: bool | None

    def message(self) -> str:
        """Returns a sentence for people."""
        if self.alive:
            return f"the run is still running: process {self.pid}, at step {self.step}"
        where = "" if self.alive is False else f" (or is still running, as process {self.pid} on {self.host})"
        return (
            f"the previous attempt ended at step {self.step} without an exit event{where} (os._exit, killed, or the "
            "machine lost power), so an exit code of 0 proves nothing. Run the same command to resume from the "
            "newest checkpoint"
        )


def running(step: int) -> dict[str, Any]:
    """Returns the fields of a `running` event of this process."""
    return {"step": step, "pid": os.getpid(), "host": socket.gethostname(), "born": _born(os.getpid())}


def newest_saved(run_dir: Path) -> int | None:
    """Returns the newest step that a run has recorded as committed, wherever its checkpoints are; None without one."""
    saved = (event.get("step") for event in _events(run_dir / EVENTS) if event.get("event") == "saved")
    return max((step for step in saved if isinstance(step, int)), default=None)


def this_process() -> dict[str, Any]:
    """Returns the identity of this process, for `is_gone`."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot(), "born": _born(os.getpid())}


def is_gone(found: dict[str, Any]) -> bool:
    """Returns whether the process of `this_process` has certainly ended: it ran on this machine, since the last
    boot."""
    here = found.get("host") == socket.gethostname() and found.get("boot") == _boot() is not None
    return here and isinstance(found.get("pid"), int) and _born(found["pid"]) != found.get("born")


def _boot() -> str | None:
    """Returns an id of this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def unfinished(run_dir: Path) -> Attempt | None:
    """Returns the last start of a run if it has no recorded end, otherwise None."""
    started: dict[str, Any] | None = None
    for event in _events(run_dir / EVENTS):
        if event.get("process", 0) == 0 and event.get("event") == RUNNING:
            started = event
        elif event.get("event") in ENDS:
            started = None
    if started is None:
        return None
    steps = (last_step(run_dir / LAST_STEP), started.get("step"))
    step = max((step for step in steps if isinstance(step, int)), default=0)
    pid, host = started.get("pid"), str(started.get("host", "?"))
    if not isinstance(pid, int):
        return None
    here = host == socket.gethostname()
    born = _born(pid)
    return Attempt(step, pid, host, (born is not None and born == started.get("born")) if here else None)


def _events(path: Path) -> Iterable[dict[str, Any]]:
    try:
        return [event for line in path.read_bytes().split(b"\n") if (event := json_object(line)) is not None]
    except OSError:
        return []


def _born(pid: int) -> int | None:
    """Returns when a process was started, in ticks since boot: the kernel reuses process numbers."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
