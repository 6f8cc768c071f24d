"""The last start of a run: how far it came, and whether it said how it ended. Known also when its process is gone
without a word.

`events.jsonl` holds `running` from the start of each, and `stopped`, `preempted` or `fault` at its end; `last_step` the
step that was last dispatched, in a page of memory that the kernel keeps for a process that dies. A run that left by
`os._exit(0)` has the exit code of one that is done, and is told apart by them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spmdkit.foundation.constants import NAMELESS

EVENTS, LAST_STEP = "events.jsonl", "last_step"
RUNNING, ENDS = "running", ("stopped", "preempted", "fault")

_WIDTH = 20


class StepMark:
    """The number of the step that was last dispatched, in each of some files; writing it costs less than a microsecond
    and waits for no disk.

    A file that cannot be mapped is left out: what it holds is for a message.
    """

    def __init__(self, paths: Iterable[Path]):
        self._maps = [opened for path in paths if (opened := _mapped(path)) is not None]

    def at(self, step: int) -> None:
        """Notes that `step` was dispatched."""
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
    """Returns the step of a `StepMark`, None where there is none."""
    try:
        return step_of(path.read_bytes())
    except OSError:
        return None


def step_of(content: bytes) -> int | None:
    """Returns the step that the content of a `StepMark` says, None where it says none."""
    try:
        return int(content[:64].partition(b"\n")[0])
    except ValueError:
        return None


_DIRECTORY_AT = 64


def tell_directory(path: Path, directory: Path) -> None:
    """Writes where the run is behind a `StepMark`, for who reads its file (`launch`)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, os.fsencode(directory) + b"\n", _DIRECTORY_AT)
        finally:
            os.close(descriptor)


def directory_of(content: bytes) -> Path | None:
    """Returns where the run is that has written `content`, None where it has not said so yet."""
    told, ended, _ = content[_DIRECTORY_AT:].partition(b"\n")
    return Path(os.fsdecode(told)) if ended and told else None


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A start of a run that did not say how it ended.

    Attributes:
        step: the last step that it dispatched, as far as is known.
        alive: it is running, on this machine; None: that cannot be known here, since it ran on another.
    """

    step: int
    pid: int
    host: str
    alive: bool | None

    def told(self) -> str:
        """Returns a sentence for people."""
        if self.alive:
            return f"the run is going on: process {self.pid}, at step {self.step}"
        where = "" if self.alive is False else f" (or is still going on, as process {self.pid} on {self.host})"
        return (
            f"the run left at step {self.step} without a word{where}: no end is in {EVENTS}. os._exit, SIGKILL or a "
            "loss of power do that, and an exit code of 0 then says nothing. Start the same command again to go on "
            "from its newest checkpoint"
        )


def running(step: int) -> dict[str, Any]:
    """Returns the fields of a `running` event of this process."""
    return {"step": step, "pid": os.getpid(), "host": socket.gethostname(), "born": _born(os.getpid())}


def newest_saved(run_dir: Path) -> int | None:
    """Returns the newest step that a run has said to be committed, wherever its checkpoints are; None where it has said
    so of none."""
    saved = (event.get("step") for event in _events(run_dir / EVENTS) if event.get("event") == "saved")
    return max((step for step in saved if isinstance(step, int)), default=None)


def this_process() -> dict[str, Any]:
    """Returns by what `is_gone` knows this process again."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot(), "born": _born(os.getpid())}


def is_gone(found: dict[str, Any]) -> bool:
    """Returns whether the process that `this_process` described has ended for certain: it was of this machine, since
    the machine was started."""
    here = found.get("host") == socket.gethostname() and found.get("boot") == _boot() is not None
    return here and isinstance(found.get("pid"), int) and _born(found["pid"]) != found.get("born")


def _boot() -> str | None:
    """Returns an id of this start of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def unfinished(run_dir: Path) -> Attempt | None:
    """Returns the last start of a run where it has no end, or None: it ended, or there was none."""
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
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _born(pid: int) -> int | None:
    """Returns when a process was started, in ticks since the machine was: the number of one that is gone may be
    another's by now."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
