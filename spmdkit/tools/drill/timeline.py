"""The observations of a drill. Times are seconds of the machine's monotonic clock."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdkit.faults.injection.fault import Fault
from spmdkit.metrics.events import parse_time
from spmdkit.tools.drill.timing import Moment

BARS = ("start", "compile", "restore", "step", "wait", "evaluate", "save", "end", "left", "dead", "restart")
"""Activities of a process, as drawn on the page: `left` exited by itself, `dead` until all have exited, `restart` until
it is started again."""

_OF_PHASE = {"begin": "start", "import": "start", "init": "compile", "evaluation": "evaluate", "waiting": "wait"}
_OF_PHASE |= {name: name for name in ("compile", "restore", "save", "end")}


def bar_of(phase: str | None) -> str:
    """Returns the bar of a phase; None: the process has not reported yet."""
    return "start" if phase is None else _OF_PHASE.get(phase, "step")


@dataclass
class Interval:
    kind: str
    begin: float
    end: float


class Bars:
    """The timeline of one process, from samples of its activity."""

    def __init__(self) -> None:
        self.bars: list[Interval] = []

    def at(self, kind: str, now: float) -> None:
        """Records the current activity of the process; it ends the previous interval."""
        if self.bars:
            self.bars[-1].end = now
        if not self.bars or self.bars[-1].kind != kind:
            self.bars.append(Interval(kind, now, now))


@dataclass
class InjectionResult:
    """One injected fault and its consequences. Times are None until they are known."""

    fault: Fault
    number: int
    process: int  # where it was injected
    moment: Moment | None  # when it was due; None: `fault.seconds`
    attempt: int = 0
    fired: float | None = None
    reached: int = 0  # the newest step that any process had begun at the injection
    phase: str = ""  # activity of the process at the injection
    failed: str = ""  # why the injection failed
    detected: float | None = None  # when the launcher or the run first detected it, and how
    detected_by: str = ""
    restored: int | None = None  # the step from which training resumed
    recovered: float | None = None  # when every process had begun a step that no process had begun before
    overtaken: bool = False  # another fault was injected before that
    in_process: bool = False  # the remaining processes continued without it in the same start
    exit_code: int | None = None  # of the attempt, if it ended with this fault
    named: tuple[int, ...] = ()  # the processes at fault, according to the launcher
    message: str = ""  # of the process that ended the attempt
    damaged: str = ""
    unfinished: str = ""  # the save that was incomplete at the end of the attempt

    @property
    def lost(self) -> int | None:
        """The steps that were begun and not restored, which are repeated."""
        return None if self.restored is None else max(0, self.reached - self.restored)


@dataclass
class Start:
    """One start of all processes."""

    begin: float
    end: float = 0.0
    first_step: float | None = None  # when each process had begun a step
    newest_before: int = 0


class Events:
    """The lines of `events.jsonl` as they are written, each one once."""

    def __init__(self, run_dir: Path):
        self._path, self._at = run_dir / "events.jsonl", 0
        self._offset = time.time() - time.monotonic()

    def new(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yields (time, event) of the new complete lines."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                text = file.read()
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # half written by a killed process
            when = parse_time(event.get("time"))
            if when is not None:
                yield when - self._offset, event
