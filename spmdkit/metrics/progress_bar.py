"""The bar at the bottom of a terminal, by rich: steps and the words below them, or a spinner during compilation."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spmdkit.metrics.progress_lines import step_position

MAX_COLUMNS = 120
"""Width of the bar without `log.columns`."""
REFRESH_PER_S = 4  # a redraw takes about 1 ms of the interpreter: more would slow down steps of 2 ms
STYLES = (
    (r"loss \S+", "bold"),
    (r"\S+ \S+/s", "green"),
    (r"left \S+|done$", "cyan"),
    (r"input wait ([2-9]\d|100)%", "yellow"),  # highlights an input wait of a fifth of the time or more
)


class Bar:
    """A thread of rich redraws it between `start` and `stop`, from `step` and `words`."""

    def __init__(self, out: Any, total_steps: int, columns: int | None = None) -> None:
        self.console = Console(file=out, force_terminal=True)
        self.columns = min(self.console.width, columns or MAX_COLUMNS) - 1  # the last column makes some terminals wrap
        self.step, self.text, self._total = 0, "", total_steps
        self._busy: RenderableType | None = None
        self._live = Live(console=self.console, get_renderable=self._rows, refresh_per_second=REFRESH_PER_S)
        self.start, self.stop = self._live.start, self._live.stop  # stop redraws and shows the cursor

    def line(self, text: str) -> None:
        """Shows a line that scrolls past the bar, not truncated."""
        self.console.print(Text(text), soft_wrap=True)

    def busy(self, text: str) -> None:
        """Shows a spinner with its time instead of the bar; an empty text restores the bar."""
        frames = "dots" if self.console.encoding.startswith("utf") else "line"
        spinner = Progress(SpinnerColumn(frames), "{task.description}", TimeElapsedColumn(), console=self.console)
        spinner.add_task(text, total=None)
        self._busy = spinner if text else None
        self._live.start()
        self._live.refresh()

    def _rows(self) -> RenderableType:
        if self._busy is not None:
            return self._busy
        steps = Table.grid(padding=(0, 1), expand=True)
        steps.add_row(Text(step_position(self.step, self._total), "bold"), ProgressBar(max(1, self._total), self.step))
        text = Text(self.text, no_wrap=True, overflow="ellipsis")
        for pattern, style in STYLES:
            text.highlight_regex(pattern, style=style)
        return Constrain(Group(steps, text), self.columns)
