"""The progress of a run as text: a progress bar on a terminal, plain lines everywhere else.

    training steps 1 to 2000
    compiling the step ...  3.2 s
    step  120/2000  loss 2.3411  12345 examples/s  left 1m20s  input wait 2%
    step  120 eval  loss 2.4021  accuracy 0.9100

No line is wider than 100 columns. If the stream is closed (terminal or pipe), progress stops silently and training
continues.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

from spmdkit.foundation.formatting import format_duration, format_seconds, visible
from spmdkit.metrics.progress_lines import COLUMNS, evaluation_line, step_position, training_line

RECENT_RECORDS = 16  # the time left uses the pace of these records, including evaluations and saves


class Progress:
    """Shows records on a stream.

    `start_step`: the first step that this process trains (1 in a new run). `mode`: "rich" (a bar), "plain" (lines),
    "auto" (a bar if `stream` ends at a user's terminal that supports one), "off" (no output). `examples_unit`: the unit
    counted per second. `columns`: width of lines; None: that of the terminal, or `COLUMNS`. `clock`: monotonic seconds,
    for the time left. NO_COLOR and TERM=dumb are respected.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 1,
        mode: Literal["auto", "rich", "plain", "off"] = "auto",
        stream: TextIO | None = None,
        examples_unit: str = "examples",
        columns: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._first, self._unit, self._clock = total_steps, start_step, examples_unit, clock
        self._marks: deque[tuple[int, float]] = deque(maxlen=RECENT_RECORDS)  # (step, time) of recent records
        self._step = start_step - 1
        self._is_off = mode == "off"
        self._out = QuietStream((sys.stdout if stream is None else stream) if mode != "off" else None)
        self._unfinished = False  # whether the last line has no newline yet
        self._bar = None
        dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
        if not dumb and (mode == "rich" or (mode == "auto" and self._out.isatty() and not _is_forwarded())):
            from spmdkit.metrics.progress_bar import Bar  # rich takes 40 ms to import

            self._bar = Bar(self._out, total_steps, columns)
        self._columns = columns or (shutil.get_terminal_size((COLUMNS, 24)).columns if self._out.isatty() else COLUMNS)

    def start(self) -> None:
        """Shows the first line immediately; call it before slow operations."""
        first, total = self._first, self._total
        text = f"training steps 1 to {total}" if first == 1 else f"continuing at step {first} of {total}"
        self.message(text if first <= total else f"nothing to train: all {total} steps are done")
        self._mark(self._step)
        self.advance(self._step)
        if self._bar:
            self._bar.start()

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Shows `compiling the step ...  3.2 s` around a `with` block, and excludes its time from the time left."""
        begun, text, outcome = self._clock(), "compiling the step ...", "failed"
        if self._bar:
            self._bar.busy(text)
        else:
            self._put(text, end="")
        try:
            yield
            outcome = format_seconds(self._clock() - begun)
        finally:
            if self._bar:
                self._bar.busy("")
            self._put(f"  {outcome}" if self._unfinished else f"{text}  {outcome}", end="\n")
        self._marks.clear()
        self._mark(self._step)

    def advance(self, step: int) -> None:
        """Moves the bar to `step` between records. Costs nothing: the bar reads it when it is redrawn."""
        self._step = step
        if self._bar:
            self._bar.step = step

    def write(self, record: Mapping[str, Any]) -> None:
        """Shows a training record, or the line of an evaluation (a record with `split`)."""
        if "split" in record:
            self.message(evaluation_line(record, self._total, self._columns))
            return
        step = int(record["step"])
        if step == self._first and "examples_per_s" not in record:
            self._marks.clear()  # the time of the first step is not typical
        self._mark(step)
        self.advance(step)
        if self._is_off:
            return
        if self._bar:
            self._bar.text = visible(
                training_line(record, self._unit, self._remaining(step), columns=self._bar.columns)
            )
        else:
            start = step_position(step, self._total)
            self.message(training_line(record, self._unit, self._remaining(step), start, self._columns))

    def message(self, text: str) -> None:
        """Shows a line, such as the run directory or a saved checkpoint. Not truncated, since it may contain a path."""
        self._put("\n" * self._unfinished + visible(text), end="\n")

    def close(self) -> None:
        """Ends the display and restores the terminal. May be called twice."""
        if self._bar:
            self._bar.stop()
        elif self._unfinished:
            self._put("", end="\n")

    def _put(self, text: str, end: str) -> None:
        if self._bar:
            self._bar.line(text)
            return
        self._unfinished = not end
        self._out.write(text + end)

    def _mark(self, step: int) -> None:
        self._marks.append((step, self._clock()))

    def _remaining(self, step: int) -> str:
        (first_step, first_time), (last_step, last_time) = self._marks[0], self._marks[-1]
        if step >= self._total:
            return "done"
        if last_step <= first_step:
            return ""
        pace_s = (last_time - first_time) / (last_step - first_step)
        return f"left {format_duration(pace_s * (self._total - step))}"


def _is_forwarded() -> bool:
    """Returns whether the terminal of this process is a pseudo-terminal of Open MPI's mpirun, and the output of
    mpirun is no terminal of this machine: a redirected log would contain the redrawn bars."""
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return False
    try:
        mine, reader = os.readlink("/proc/self/fd/1"), os.getppid()
        while (target := os.readlink(f"/proc/{reader}/fd/1")) == mine:  # a wrapper script
            reader = int(Path(f"/proc/{reader}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):  # another user's process, or no /proc
        return True
    return not target.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))


GONE = (OSError, ValueError, AttributeError)  # the other end is closed, the file object is closed, there is no stream


class QuietStream:
    """A text stream that ignores a closed output, and prints `?` for characters that it cannot encode."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: Any = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with contextlib.suppress(*GONE):
            self._stream.write(text.encode(self.encoding, errors="replace").decode(self.encoding))
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """Does nothing: `write` has flushed."""

    def isatty(self) -> bool:
        with contextlib.suppress(*GONE):
            return bool(self._stream.isatty())
        return False
