"""The progress bar on a terminal, by rich: at the bottom, with the words below it, while other lines scroll past."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.spinner import Spinner
from rich.text import Text

from spmdkit.metrics.status import MAX_COLUMNS, Status
from spmdkit.words import format_duration

REFRESH_PER_S = 4  # a redraw takes about 1 ms of the interpreter: more would be seen in steps of 2 ms
STYLES = (
    (r"loss \S+", "bold"),
    (r"\S+ \S+/s", "green"),
    (r"left \S+|done$", "cyan"),
    (r"input wait ([2-9]\d|100)%", "yellow"),  # a fifth of the time without data is worth seeing
)


class BarDisplay(Progress):
    """Keeps a bar at the bottom of a terminal from `show` or `begin` until `close`, in a thread of rich's."""

    follows_steps = True

    def __init__(self, stream: Any, clock: Callable[[], float], console: Console | None = None) -> None:
        self._out = console or Console(file=stream, force_terminal=True, highlight=False)
        self._columns = min(self._out.width, MAX_COLUMNS) - 1  # the last column makes some terminals wrap
        self._spinner = Spinner("dots" if (self._out.encoding or "").startswith("utf") else "line", style="cyan")
        self._words, self._busy, self._closed = Text(""), ("", 0.0), False
        place = TextColumn("[bold]{task.description}")
        super().__init__(place, BarColumn(None), console=self._out, refresh_per_second=REFRESH_PER_S, get_time=clock)
        self._task = self.add_task("", total=1, visible=False)

    def show(self, status: Status, record: bool) -> None:
        words = Text(status.words(self._columns, place=False), no_wrap=True, overflow="ellipsis")
        for pattern, style in STYLES:
            words.highlight_regex(pattern, style=style)
        self._words = words
        total, step = max(1, status.total_steps), max(0, status.step)
        self.update(self._task, description=status.place, total=total, completed=step, visible=True)
        self._draw()

    def line(self, text: str) -> None:
        self._out.print(Text(text), soft_wrap=True)

    def begin(self, text: str) -> None:
        self._busy = text, self.get_time()
        self._draw()

    def end(self, text: str) -> None:
        (begun, _), self._busy = self._busy, ("", 0.0)
        self.line(f"{begun}  {text}")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.stop()  # draws the last state, and shows the cursor again

    def _draw(self) -> None:
        if not self._closed:
            self.start()

    def get_renderables(self) -> Iterable[RenderableType]:
        text, begun = self._busy
        if text:
            self._spinner.update(text=f"{text}  {format_duration(self.get_time() - begun)}")
            yield self._spinner
            return
        table = self.make_tasks_table(self.tasks)
        table.width = self._columns
        yield table
        if self._words:
            yield self._words
