"""What a drill sees: faults that came, bars of each process, events of the run. Times are of the machine's monotonic
clock, in seconds."""

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
"""What a process does, as it is drawn: `left` by itself, `dead` until all are gone, `restart` until it is started
again."""

_OF_PHASE = {"begin": "start", "import": "start", "init": "compile", "evaluation": "evaluate", "waiting": "wait"}
_OF_PHASE |= {name: name for name in ("compile", "restore", "save", "end")}


def bar_of(phase: str | None) -> str:
    """Returns the bar of a phase of the journal; None: nothing was heard yet."""
    return "start" if phase is None else _OF_PHASE.get(phase, "step")


@dataclass
class Stretch:
    """What a process did for a while."""

    kind: str
    begin: float
    end: float


class Bars:
    """The bars of one process, from what it is seen doing now and then."""

    def __init__(self) -> None:
        self.bars: list[Stretch] = []

    def at(self, kind: str, now: float) -> None:
        """Says what it does now: it has done what was said before until then."""
        if self.bars:
            self.bars[-1].end = now
        if not self.bars or self.bars[-1].kind != kind:
            self.bars.append(Stretch(kind, now, now))


@dataclass
class InjectionResult:
    """One fault: that it came, and what followed. Times are None until they are known.

    Attributes:
        process: whom it injection.
        moment: when it was to come; None: `fault.seconds`.
        reached: the newest step that any process had begun by then.
        phase: what the process did.
        failed: why it could not be done.
        detected, detected_by: when the launcher or the run first noticed, and what said so.
        restored: the step from which training went on.
        recovered: when every process had begun a step that none had begun before.
        overtaken: another fault came before that.
        in_process: the others went on without it in the same start, by another epoch.
        unfinished: the save that the end of the attempt has left half written, if there was one.
    """

    fault: Fault
    number: int
    process: int
    moment: Moment | None
    attempt: int = 0
    fired: float | None = None
    reached: int = 0
    phase: str = ""
    failed: str = ""
    detected: float | None = None
    detected_by: str = ""
    restored: int | None = None
    recovered: float | None = None
    overtaken: bool = False
    in_process: bool = False
    damaged: str = ""
    unfinished: str = ""

    @property
    def lost(self) -> int | None:
        """The steps that were begun and not kept, which are done again."""
        return None if self.restored is None else max(0, self.reached - self.restored)


@dataclass
class Start:
    """One start of all processes; `first_step`: when each had begun a step."""

    begin: float
    end: float = 0.0
    first_step: float | None = None
    newest_before: int = 0


class Events:
    """The lines of `events.jsonl` as they come, each once, with their time on the monotonic clock."""

    def __init__(self, run_dir: Path):
        self._path, self._at = run_dir / "events.jsonl", 0
        self._offset = time.time() - time.monotonic()

    def new(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yields (time, event) of the lines that are whole by now."""
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
                continue  # torn by a kill
            when = parse_time(event.get("time"))
            if when is not None:
                yield when - self._offset, event
