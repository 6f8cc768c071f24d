"""The last start of a run: its last step, and whether it recorded an end. Also available if its process was killed.

`events.jsonl` has `running` for each start, and `stopped`, `preempted` or `fault` for its end. `last_step` has the last
dispatched step, in a mapped page that the kernel retains after the process dies. A run that ended by `os._exit(0)` has
the exit code of a finished run. These two files distinguish the two cases.
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
from spmdkit.foundation.files import json_object, read_regular

EVENTS, LAST_STEP = "events.jsonl", "last_step"
RUNNING, ENDS = "running", ("stopped", "preempted", "fault")

_WIDTH = 20


class StepMark:
    """The number of the last dispatched step, in one or more files. A write takes less than a microsecond and does not
    wait for the disk.

    A file that cannot be mapped is ignored, since only a message uses its content.
    """

    def __init__(self, paths: Iterable[Path]):
        self._maps = [opened for path in paths if (opened := _mapped(path)) is not None]

    def at(self, step: int) -> None:
        """Records that `step` was dispatched."""
        for page in self._maps:
            page[:_WIDTH] = b"%20d" % step

    def close(self) -> None:
        """Closes the files. May be called twice."""
        maps, self._maps = self._maps, []
        for page in maps:
            page.close()


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
    """Returns the step in a `StepMark` file, or None without one."""
    try:
        return step_of(read_regular(path))
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
    """Writes the run's directory after the step of a `StepMark` file, for its reader (`launch`)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, os.fsencode(directory) + b"\n", _DIRECTORY_AT)
        finally:
            os.close(descriptor)


def directory_of(content: bytes) -> Path | None:
    """Returns the run's directory from the content of a `StepMark` file, or None if it is not written yet."""
    name, ended, _ = content[_DIRECTORY_AT:].partition(b"\n")
    return Path(os.fsdecode(name)) if ended and name else None


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A start of a run without a recorded end.

    Attributes:
        step: the last dispatched step, if known.
        alive: whether it is running on this machine; None: unknown, since it ran on another machine.
    """

    step: int
    pid: int
    host: str
    alive: bool | None

    def message(self) -> str:
        """Returns a description for users."""
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
    return {"step": step, "pid": os.getpid(), "host": socket.gethostname(), "born": _start_ticks(os.getpid())}


def newest_saved(run_dir: Path) -> int | None:
    """Returns the newest step that a run has recorded as committed or restored, for any location of the checkpoints, or
    None."""
    known = (event for event in _events(run_dir / EVENTS) if event.get("event") in ("saved", "restored"))
    return max((step for step in (event.get("step") for event in known) if isinstance(step, int)), default=None)


def committed_steps(run_dir: Path) -> set[int]:
    """Returns the steps that events.jsonl records as committed, up to those that retention has deleted. A rollback, a
    resume from an earlier step, a quarantine and `checkpoint rm` remove steps from the set."""
    steps = set[int]()
    for event in _events(run_dir / EVENTS):
        kind, step = event.get("event"), event.get("step")
        if kind == "checkpoint_quarantined":
            steps = {each for each in steps if str(each) != event.get("name")}
        elif isinstance(step, int) and kind == "saved":
            steps.add(step)
        elif isinstance(step, int) and kind == "checkpoint_removed":
            steps.discard(step)
        elif isinstance(step, int) and kind in ("started", "restored", "rolled_back"):
            steps = {each for each in steps if each <= step}
    return steps


def this_process() -> dict[str, Any]:
    """Returns the identity of this process, for `is_gone`."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot_id(), "born": _start_ticks(os.getpid())}


def is_gone(found: dict[str, Any]) -> bool:
    """Returns whether the process of `this_process` has exited; False if unknown (another machine or boot)."""
    same_boot = found.get("host") == socket.gethostname() and found.get("boot") == _boot_id() is not None
    return same_boot and isinstance(found.get("pid"), int) and _start_ticks(found["pid"]) != found.get("born")


def _boot_id() -> str | None:
    """Returns an id of this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def unfinished(run_dir: Path) -> Attempt | None:
    """Returns the last start of a run if its end is not recorded, otherwise None."""
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
    same_host = host == socket.gethostname()
    born = _start_ticks(pid)
    return Attempt(step, pid, host, (born is not None and born == started.get("born")) if same_host else None)


def _events(path: Path) -> Iterable[dict[str, Any]]:
    try:
        return [event for line in read_regular(path).split(b"\n") if (event := json_object(line)) is not None]
    except OSError:
        return []


def _start_ticks(pid: int) -> int | None:
    """Returns the start time of a process in ticks since boot, since the kernel reuses process IDs; None for one that
    has ended, also while its parent has not read its exit status."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return None
