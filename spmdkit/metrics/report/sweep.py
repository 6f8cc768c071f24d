"""The page and the PNG of `spmdkit plan --sweep`, and the page of `--target A,B`: rows and charts."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from spmdkit.errors import ConfigError
from spmdkit.foundation.files import write_requested
from spmdkit.foundation.formatting import counted, format_count
from spmdkit.metrics.report.chart import BOTTOM, LEFT, RIGHT, TOP, Scale, axes
from spmdkit.metrics.report.page import (
    KEEP,
    NUM_COLORS,
    NUMBER,
    chart_grid,
    heading,
    mark,
    page,
    paragraph,
    section,
    table,
)

WIDTH, HEIGHT = 440, 280
INCHES, DPI = (5.0, 4.0), 120


@dataclass(frozen=True)
class Chart:
    """Lines over the values of a sweep.

    Attributes:
        label, x_label: of the axes.
        series: name of a line (empty: the only one) -> its points, from left to right.
        ticks: position on the x axis -> its text.
    """

    label: str
    x_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    ticks: Mapping[float, str]

    @property
    def points(self) -> list[tuple[float, float]]:
        """The points of all lines."""
        return [point for points in self.series.values() for point in points]

    @property
    def is_log(self) -> bool:
        """Whether the x axis is logarithmic: the values are positive and span at least a factor of 4."""
        return min(self.ticks) > 0 and max(self.ticks) >= 4 * min(self.ticks)


def write_rows(
    name: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    charts: Sequence[Chart],
    notes: Sequence[str],
    path: Path,
) -> None:
    """Writes the page of several plans.

    Args:
        name: its title.
        head: names of the columns.
        rows: the cells of each plan.
        charts: drawn below the table.
        notes: sentences below the table.

    Raises:
        ConfigError: the file cannot be written.
    """
    columns = {column: KEEP if number < 2 else NUMBER for number, column in enumerate(head)}
    tones = {"yes": "good", "no": "bad", "over budget": "bad"}
    marked = [(first, mark(tones.get(fits, ""), fits), *others) for first, fits, *others in rows]
    shown = table(columns, marked) + "".join(map(paragraph, notes))
    drawn = [(chart.label, draw(chart)) for chart in charts if chart.points]
    body = [heading(name, [], [counted(len(rows), "plan")]), section("Plans", shown)]
    body += [section("Charts", chart_grid(drawn))] if drawn else []
    write_requested("--html", path, page(name, body, "spmdkit plan"))


def draw(chart: Chart) -> str:
    """Returns a chart as SVG, with the names of its lines at their ends."""
    low, high = min(chart.ticks), max(chart.ticks)
    low, high = (low, high) if high > low else (low - 1, high + 1)
    x = Scale(low, high, LEFT, WIDTH - RIGHT - 40, log=chart.is_log)
    y = Scale(0.0, 1.08 * max(value for _, value in chart.points), HEIGHT - BOTTOM, TOP)
    up = {tick: format_count(tick) if tick >= 1 else f"{tick:.3g}" for tick in y.ticks()}
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.label)}">',
        *axes(x, y, {t: escape(text) for t, text in chart.ticks.items()}, up, escape(chart.x_label), chart.label),
    ]
    for number, (name, points) in enumerate(chart.series.items()):
        style = f"c{number % NUM_COLORS}"
        line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        parts.append(f'<polyline class="{style}" points="{line}"/>')
        for a, b in points:
            title = f"<title>{escape(f'{name} {chart.ticks[a]}: {b:.4g}'.strip())}</title>"
            parts.append(f'<circle class="{style}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5">{title}</circle>')
        if name and points:
            a, b = points[-1]
            parts.append(f'<text x="{x(a) + 7:.1f}" y="{y(b) + 4:.1f}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"])


def check_png() -> None:
    """Raises ConfigError if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed. Try pip install 'spmdkit[plot]'; --html draws the same "
            "charts without it."
        )


def write_png(name: str, charts: Sequence[Chart], path: Path) -> None:
    """Draws the charts side by side with matplotlib.

    Raises:
        ConfigError: the file cannot be written, or its ending is unknown.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(INCHES[0] * len(charts), INCHES[1]), dpi=DPI, layout="constrained")
    for chart, ax in zip(charts, figure.subplots(1, len(charts), squeeze=False)[0], strict=True):
        for line, points in chart.series.items():
            if points:
                ax.plot(*zip(*points, strict=True), marker="o", label=line)
        ax.set_xscale("log" if chart.is_log else "linear")
        ax.set_xticks(list(chart.ticks), list(chart.ticks.values()), minor=False)
        ax.minorticks_off()
        ax.set(xlabel=chart.x_label, ylabel=chart.label)
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
        if len(chart.series) > 1:
            ax.legend()
    figure.suptitle(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written ({error}). Choose a .png in a writable folder.") from error
