"""What a person sees while a run trains: a progress bar on a terminal, plain lines everywhere else.

    training steps 1 to 2000
    compiling the step ...  3.2 s
    step  120/2000  loss 2.3411  12345 examples/s  left 1m20s  input wait 2%
    step  120 eval  loss 2.4021  accuracy 0.9100

No line is wider than 100 columns. The face is never the reason that a run ends: when its stream goes away (a closed
terminal, a closed pipe), it falls silent and training goes on.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TextIO

from spmdkit.metrics.jsonl import FIRST_KEYS, LAST_KEYS, plain_number
from spmdkit.words import format_duration, format_rate, format_seconds, format_value

MAX_COLUMNS = 100
RECENT_RECORDS = 16  # time left is the pace of this many records, evaluations and saves among them included


@dataclass(frozen=True)
class Status:
    """Where training stands, in words ready to print. Empty where unknown."""

    step: int
    total_steps: int
    loss: str = ""
    metrics: tuple[str, ...] = ()
    rate: str = ""
    left: str = ""
    wait: str = ""

    @property
    def place(self) -> str:
        """`step  120/2000`, of the same width at every step."""
        total = str(self.total_steps)
        return f"step {self.step:>{len(total)}}/{total}"


class Display(Protocol):
    """Puts words on a stream; one for plain streams, one for terminals.

    Attributes:
        follows_steps: whether it shows steps between records.
    """

    follows_steps: bool

    def show(self, status: Status, record: bool) -> None:
        """Shows where training stands; `record` is False when only the step moved on."""

    def line(self, text: str) -> None:
        """Shows one line that stays."""

    def begin(self, text: str) -> None:
        """Shows that something which takes a while has begun."""

    def end(self, text: str) -> None:
        """Completes what `begin` showed by its outcome."""

    def close(self) -> None:
        """Leaves the stream as it was found."""


class ProgressFace:
    """A sink that shows records to a person.

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
        self._display = _open_display(mode, sys.stdout if stream is None else stream, clock, console)

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
        step = int(record["step"])
        if "split" in record:
            self._display.line(self._evaluation_line(step, record))
            return
        self._mark(step)
        step_time_s, wait_s = record.get("step_time_s"), record.get("input_wait_s")
        share = wait_s / step_time_s if wait_s is not None and step_time_s else None
        rate = record.get("examples_per_s")
        if rate is None and step == self._first:  # the first step: how long it took says nothing about the rest
            self._marks.clear()
            self._mark(step)
        self._status = Status(
            step=step,
            total_steps=self._status.total_steps,
            loss=f"loss {format_value(plain_number('loss', record['loss']))}" if "loss" in record else "",
            metrics=tuple(_extra_metrics(record)),
            rate=f"{format_rate(rate)} {self._unit}/s" if rate is not None else "",
            left=self._left(step),
            wait=f"input wait {min(share, 1):.0%}" if share is not None else "",
        )
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

    def _evaluation_line(self, step: int, record: Mapping[str, Any]) -> str:
        width = len(self._status.place)
        place = f"step {step:>{len(str(self._status.total_steps))}} {record['split']}".ljust(width)
        loss = [f"loss {format_value(plain_number('loss', record['loss']))}"] if "loss" in record else []
        return fit([place, *loss, *_extra_metrics(record)])


def fit(pieces: list[str], optional: range = range(0), columns: int = MAX_COLUMNS) -> str:
    """Returns the pieces that are not empty, two spaces apart, in at most `columns`.

    Those with an index in `optional` go first, from the last one; then whatever is too much at the end.
    """
    parts = dict(enumerate(pieces))
    for index in (*reversed(optional), *reversed(range(1, len(pieces)))):
        if len(_join(parts)) <= columns:
            break
        parts.pop(index, None)
    return _join(parts)[:columns]


def _join(parts: Mapping[int, str]) -> str:
    return "  ".join(text for text in parts.values() if text)


def training_line(status: Status, columns: int = MAX_COLUMNS) -> str:
    """Returns `step  120/2000  loss 2.3411  <other metrics>  12345 examples/s  left 1m20s  input wait 2%`."""
    pieces = [status.place, status.loss, *status.metrics, status.rate, status.left, status.wait]
    return fit(pieces, range(2, 2 + len(status.metrics)), columns)


class PlainDisplay:
    """Lines for a file, a pipe or a plain terminal; each is flushed."""

    follows_steps = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._open_line = False

    def show(self, status: Status, record: bool) -> None:
        if record:
            self.line(training_line(status))

    def line(self, text: str) -> None:
        self._put(("\n" if self._open_line else "") + text + "\n")
        self._open_line = False

    def begin(self, text: str) -> None:
        self._put(("\n" if self._open_line else "") + text)
        self._open_line = True

    def end(self, text: str) -> None:
        self._put(f"  {text}\n")
        self._open_line = False

    def close(self) -> None:
        if self._open_line:
            self.line("")

    def _put(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class SilentDisplay:
    """Shows nothing."""

    follows_steps = False

    def show(self, status: Status, record: bool) -> None: ...
    def line(self, text: str) -> None: ...
    def begin(self, text: str) -> None: ...
    def end(self, text: str) -> None: ...
    def close(self) -> None: ...


class QuietStream:
    """A text stream that falls silent when what is behind it is gone, and prints `?` for what it cannot encode."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False

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
        return not self._gone and is_terminal(self._stream)

    def __getattr__(self, name: str) -> Any:  # encoding, fileno: what rich asks a stream for
        return getattr(self._stream, name)


def is_terminal(stream: TextIO) -> bool:
    """Returns whether `stream` is a terminal; False for closed streams and objects that cannot say."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def _open_display(mode: str, stream: TextIO, clock: Callable[[], float], console: Any) -> Display:
    if mode == "off":
        return SilentDisplay()
    quiet: Any = QuietStream(stream)
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    wants_bar = mode == "rich" or (mode == "auto" and is_terminal(stream))
    if console is not None:
        wants_bar = mode == "rich" or (mode == "auto" and console.is_terminal)
        dumb = console.is_dumb_terminal
    if not wants_bar or dumb:
        return PlainDisplay(quiet if console is None else console.file)
    from spmdkit.metrics.progress_bar import BarDisplay  # rich takes 60 ms to import

    return BarDisplay(quiet, clock, console)


def _extra_metrics(record: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(set(record) - set(FIRST_KEYS) - set(LAST_KEYS)):
        yield f"{name} {format_value(plain_number(name, record[name]))}"
