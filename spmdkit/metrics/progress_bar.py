"""The progress bar of `ProgressFace` on a terminal, by rich: at the bottom, while other lines scroll past it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from spmdkit.metrics.progress import MAX_COLUMNS, Status, fit
from spmdkit.words import format_duration

MIN_BAR, MAX_BAR = 8, 30
LEFT_COLUMNS = len("left 59m59s")
REFRESH_PER_S = 4  # a redraw takes about 1 ms of the interpreter: more would be seen in steps of 2 ms


class BarDisplay:
    """Keeps a bar at the bottom of a terminal from `show` or `begin` until `close`, in a thread of rich's."""

    follows_steps = True

    def __init__(self, stream: TextIO, clock: Callable[[], float], console: Console | None = None) -> None:
        self._console = console or Console(file=stream, force_terminal=True, highlight=False)
        self._clock = clock
        self._status: Status | None = None
        self._task: tuple[str, float] | None = None
        self._spinner = Spinner("dots" if (self._console.encoding or "").startswith("utf") else "line", style="cyan")
        self._live: Live | None = Live(
            console=self._console, get_renderable=self._render, refresh_per_second=REFRESH_PER_S, transient=False
        )

    def show(self, status: Status, record: bool) -> None:
        self._status = status
        self._ensure_started()

    def line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def begin(self, text: str) -> None:
        self._task = (text, self._clock())
        self._ensure_started()

    def end(self, text: str) -> None:
        if self._task is not None:
            begun, self._task = self._task[0], None
            self.line(f"{begun}  {text}")

    def close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            if live.is_started:
                live.stop()  # draws the last state, and shows the cursor again

    def _ensure_started(self) -> None:
        if self._live is not None and not self._live.is_started:
            self._live.start(refresh=True)

    def _render(self) -> RenderableType:
        columns = min(self._console.width, MAX_COLUMNS) - 1  # the last column makes some terminals wrap
        status, task = self._status, self._task
        if task is not None:
            text, begun = task
            return _row([self._spinner, Text(f"{text}  {format_duration(self._clock() - begun)}")])
        if status is None:
            return Text("")
        pieces = [status.loss, *status.metrics, status.rate, status.left, status.wait]
        optional = range(1, 1 + len(status.metrics))
        room = columns - len(status.place) - 4  # beside the step: gap, bar, gap, words
        needed = len(fit([p for i, p in enumerate(pieces) if i not in optional], columns=columns))
        needed += max(0, LEFT_COLUMNS - len(status.left))  # or the bar would jump whenever the time left gets shorter
        beside = needed <= room - MIN_BAR
        words = fit(pieces, optional, room - MIN_BAR if beside else columns)
        width = max(4, min(MAX_BAR, room - max(needed, len(words)) if beside else room))
        bar = ProgressBar(
            total=max(1, status.total_steps),
            completed=max(0, status.step),
            width=width,
            complete_style="cyan",
            finished_style="green",
        )
        place = Text(status.place, style="bold")
        if beside:
            return _row([place, bar, _painted(words)])
        return Group(_row([place, bar]), _painted(words))


def _row(cells: list[RenderableType]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in cells:
        table.add_column(no_wrap=True)
    table.add_row(*cells)
    return table


def _painted(words: str) -> Text:
    text = Text(words, no_wrap=True, overflow="ellipsis")
    for pattern, style in (
        (r"loss \S+", "bold"),
        (r"\S+ \S+/s", "green"),
        (r"left \S+|done$", "cyan"),
        (r"input wait ([2-9]\d|100)%", "yellow"),  # a fifth of the time without data is worth seeing
    ):
        text.highlight_regex(pattern, style=style)
    return text
