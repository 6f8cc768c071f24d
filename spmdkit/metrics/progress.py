"""What a person sees while a run trains: a progress bar on a terminal, plain lines everywhere else.

    training steps 1 to 2000
    compiling the step ...  3.2 s
    step  120/2000  loss 2.3411  12345 examples/s  left 1m20s  input wait 2%
    step  120 eval  loss 2.4021  accuracy 0.9100

No line is wider than 100 columns. Progress is never the reason that a run ends: when its stream goes away (a closed
terminal, a closed pipe), it falls silent and training goes on.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TextIO

from spmdkit.metrics.status import Status, evaluation_line, status_of
from spmdkit.words import format_duration, format_seconds

RECENT_RECORDS = 16  # time left is the pace of this many records, evaluations and saves among them included


class ProgressFace:
    """Shows records to a person.

    `start_step`: the first step that this process trains (1 in a new run). `mode`: "rich" (a bar), "plain" (lines),
    "auto" (a bar where `stream` is a terminal that can show one), "off" (nothing at all). `examples_unit`: what is
    counted per second. `clock`: monotonic seconds, for the time left. NO_COLOR and TERM=dumb are respected.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 1,
        mode: Literal["auto", "rich", "plain", "off"] = "auto",
        stream: TextIO | None = None,
        examples_unit: str = "examples",
        *,
        clock: Callable[[], float] = time.monotonic,
        console: Any = None,
    ) -> None:
        self._clock = clock
        self._unit = examples_unit
        self._first = start_step
        self._status = Status(step=start_step - 1, total_steps=total_steps)
        self._marks: deque[tuple[int, float]] = deque(maxlen=RECENT_RECORDS)  # (step, time) of recent records
        self._display = _open_display(mode, QuietStream(sys.stdout if stream is None else stream), clock, console)

    def start(self) -> None:
        """Shows the first line, at once; call it before anything slow."""
        total = self._status.total_steps
        if self._first > total:
            text = f"nothing to train: all {total} steps are done"
        elif self._first == 1:
            text = f"training steps 1 to {total}"
        else:
            text = f"continuing at step {self._first} of {total}"
        self._mark(self._first - 1)
        self._display.line(text)
        self._display.show(self._status, record=False)

    @contextmanager
    def compiling(self, what: str = "the step") -> Iterator[None]:
        """Shows `compiling the step ...  3.2 s` around a `with` block, and leaves its time out of the time left."""
        begun = self._clock()
        self._display.begin(f"compiling {what} ...")
        try:
            yield
        except BaseException:
            self._display.end("failed")
            raise
        self._display.end(format_seconds(self._clock() - begun))
        self._marks.clear()
        self._mark(self._status.step)

    def advance(self, step: int) -> None:
        """Moves the bar to `step` between records. Where there is no bar it costs nothing and shows nothing."""
        if self._display.follows_steps:
            self._status = replace(self._status, step=step)
            self._display.show(self._status, record=False)

    def write(self, record: Mapping[str, Any]) -> None:
        """Shows a training record, or the line of an evaluation (a record with `split`)."""
        step, total = int(record["step"]), self._status.total_steps
        if "split" in record:
            self._display.line(evaluation_line(record, total))
            return
        if (
            step == self._first and "examples_per_s" not in record
        ):  # how long the first step took says nothing about the rest
            self._marks.clear()
        self._mark(step)
        self._status = status_of(record, total, self._unit, self._left(step))
        self._display.show(self._status, record=True)

    def message(self, text: str) -> None:
        """Shows another line: the run directory, a saved checkpoint. Never cut, since it may hold a path."""
        self._display.line(text)

    def close(self) -> None:
        """Ends the display and gives the terminal back. May be called twice."""
        self._display.close()

    def _mark(self, step: int) -> None:
        self._marks.append((step, self._clock()))

    def _left(self, step: int) -> str:
        (first_step, first_time), (last_step, last_time) = self._marks[0], self._marks[-1]
        if step >= self._status.total_steps:
            return "done"
        if last_step <= first_step:
            return ""
        pace_s = (last_time - first_time) / (last_step - first_step)
        return f"left {format_duration(pace_s * (self._status.total_steps - step))}"


class PlainDisplay:
    """Lines for a file, a pipe or a plain terminal; each is flushed. `progress_bar.BarDisplay` is the one for terminals.

    Attributes:
        follows_steps: whether steps between records are shown.
    """

    follows_steps = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._open_line = False

    def show(self, status: Status, record: bool) -> None:
        """Shows where training stands; `record` is False when only the step moved on."""
        if record:
            self.line(status.words())

    def line(self, text: str) -> None:
        """Shows one line that stays."""
        self._put(("\n" if self._open_line else "") + text + "\n", open_line=False)

    def begin(self, text: str) -> None:
        """Shows that something which takes a while has begun."""
        self._put(("\n" if self._open_line else "") + text, open_line=True)

    def end(self, text: str) -> None:
        """Completes what `begin` showed by its outcome."""
        self._put(f"  {text}\n", open_line=False)

    def close(self) -> None:
        """Leaves the stream as it was found."""
        if self._open_line:
            self.line("")

    def _put(self, text: str, open_line: bool) -> None:
        self._open_line = open_line
        self._stream.write(text)
        self._stream.flush()


class QuietStream:
    """A text stream that falls silent when what is behind it is gone, and prints `?` for what it cannot encode."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: Any = stream
        self._gone = stream is None

    def write(self, text: str) -> int:
        if not self._gone:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                self._stream.write(text.encode(encoding, errors="replace").decode(encoding))
            except (OSError, ValueError):  # ValueError: the file object was closed
                self._gone = True
        return len(text)

    def flush(self) -> None:
        if not self._gone:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._gone = True

    def isatty(self) -> bool:
        try:
            return not self._gone and bool(self._stream.isatty())
        except (AttributeError, ValueError):
            return False

    def __getattr__(self, name: str) -> Any:  # encoding, fileno: what rich asks a stream for
        return getattr(self._stream, name)


def _open_display(mode: str, stream: QuietStream, clock: Callable[[], float], console: Any) -> Any:
    if mode == "off":
        return PlainDisplay(QuietStream(None))
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    if dumb or not (mode == "rich" or (mode == "auto" and stream.isatty())):
        return PlainDisplay(stream)
    from spmdkit.metrics.progress_bar import BarDisplay  # rich takes 60 ms to import

    return BarDisplay(stream, clock, console)
