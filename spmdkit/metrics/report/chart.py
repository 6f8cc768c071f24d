"""A line chart as inline SVG: no script, no font, no external file. Colors are CSS variables of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from spmdkit.foundation.formatting import format_value

LEFT, RIGHT, TOP, BOTTOM = 80, 20, 14, 40  # margins around the plot, in SVG units
LOG_RATIO = 50.0  # a positive series that spans more than this is drawn on a log scale
MAX_POINTS = 800  # about one per unit of width: more are not visible
SMOOTH_FROM = 80  # number of records from which a mean line is drawn over the raw one

Point = tuple[int, float]


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        name: shown in the legend.
        points: (step, value) in order of steps.
        color: number of its color and dashes.
        has_dots: marks every point; otherwise many points are drawn thin, with a bold mean.
    """

    name: str
    points: Sequence[Point]
    color: int = 0
    has_dots: bool = False

    @property
    def window(self) -> int:
        """Number of points in each mean."""
        is_raw = self.has_dots or len(self.points) < SMOOTH_FROM
        return 1 if is_raw else len(self.points) // 80 * 2 + 1


@dataclass(frozen=True)
class Scale:
    """Maps values to coordinates: `low` to `start`, `high` to `end`, linearly or by logarithm. `gap`: between ticks."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    gap: float = 38

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        share = ((math.log10(value) if self.log else value) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Returns round values between `low` and `high`."""
        if self.log:
            return _log_ticks(self.low, self.high)
        return linear_ticks(self.low, self.high, max(2, round(abs(self.end - self.start) / self.gap)))


def line_chart(series: Sequence[Series], label: str, width: int = 880, height: int = 340) -> str:
    """Returns an `<svg>` of the series over steps, or a sentence if no value is finite.

    Non-finite values leave a gap and a mark on the step axis. The y axis is logarithmic if all values are positive and
    span more than `LOG_RATIO`; the label states it.
    """
    finite = [(step, value) for s in series for step, value in s.points if math.isfinite(value)]
    if not finite:
        return f'<p class="none">No finite value of {escape(label)} was recorded.</p>'
    steps = [step for s in series for step, _ in s.points]
    values = [value for _, value in finite]
    log = min(values) > 0 and max(values) / min(values) > LOG_RATIO
    x = Scale(*_padded_range(min(steps), max(steps), share=0), LEFT, width - RIGHT, gap=70)
    low, high = (min(values) / 1.15, max(values) * 1.15) if log else _padded_range(min(values), max(values), share=0.06)
    y = Scale(low, high, height - BOTTOM, TOP, log)
    across = {tick: _whole(tick) for tick in x.ticks() if tick == round(tick)}
    up = {tick: _tick(tick, y) for tick in y.ticks()}
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)} over steps">',
        *axes(x, y, across, up, "step", label + (" (log scale)" if log else "")),
    ]
    for s in series:
        parts += _line(s, x, y)
        parts += [
            f'<line class="bad" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{height - BOTTOM}"'
            f' y2="{height - BOTTOM - 10}">'
            f"<title>{escape(s.name)} at step {step}: {value}</title></line>"
            for step, value in s.points
            if not math.isfinite(value)
        ][:MAX_POINTS]
    return "\n".join([*parts, "</svg>"])


def legend(series: Sequence[Series]) -> str:
    """Returns the legend as HTML, so that it wraps with the page."""
    items = [f'<span class="key c{s.color}">{escape(s.name)}</span>' for s in series if s.points]
    window = max((s.window for s in series), default=1)
    if window > 1:
        items.append(f"<span>bold: mean of {window} records</span>")
    return f'<div class="legend">{"".join(items)}</div>'


def linear_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Returns about `count` multiples of 1, 2 or 5 times a power of ten between `low` and `high`."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, math.ceil(len(decades) / 8))
    multiples = (1, 2, 5) if len(decades) <= 3 else (1,)
    ticks = [m * 10.0**d for d in decades if d % every == 0 for m in multiples]
    return [t for t in ticks if low <= t <= high]


def _padded_range(low: float, high: float, share: float) -> tuple[float, float]:
    """Returns a slightly wider range that is never empty."""
    if high == low:
        margin = abs(low) * 0.1 or 1.0
        return low - margin, high + margin
    return low - (high - low) * share, high + (high - low) * share


def axes(
    x: Scale, y: Scale, across: Mapping[float, str], up: Mapping[float, str], x_label: str, y_label: str
) -> list[str]:
    """Returns the axes of a chart with ticks, given as value -> text."""
    left, right, bottom, middle = x.start, x.end, y.start, (y.start + y.end) / 2
    turned, parts = f'transform="rotate(-90 12 {middle:.0f})"', []
    for tick, text in up.items():
        at = y(tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for tick, text in across.items():
        at = x(tick)
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{text}</text>')
    return [
        *parts,
        f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>',
        f'<text class="label" x="{(left + right) / 2:.0f}" y="{bottom + 35}" text-anchor="middle">{x_label}</text>',
        f'<text class="label" x="12" y="{middle:.0f}" text-anchor="middle" {turned}>{escape(y_label)}</text>',
    ]


def _tick(value: float, scale: Scale) -> str:
    """Returns the text of a tick, with as many digits as the distance to the next tick needs."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.6g}" if scale.log else f"{value:.2e}" if value != round(value) else _whole(value)
    if scale.log:
        return f"{value:g}"
    ticks = scale.ticks()
    distance = ticks[1] - ticks[0] if len(ticks) > 1 else abs(value)
    digits = min(6, max(0, -math.floor(math.log10(distance) + 1e-9)))
    return f"{value:.{digits}f}" if digits else _whole(value)


def _whole(value: float) -> str:
    return f"{round(value):,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def _line(series: Series, x: Scale, y: Scale) -> list[str]:
    finite = [(step, value) for step, value in series.points if math.isfinite(value)]
    style = f"c{series.color}"
    if series.has_dots or len(finite) <= 2:
        dots = [
            f'<circle class="{style}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="3.5">'
            f"<title>{escape(series.name)} at step {step}: {format_value(value)}</title></circle>"
            for step, value in downsample(finite, MAX_POINTS // 4)
        ]
        return [*_paths(series.points, x, y, style), *dots]
    if series.window == 1:
        return _paths(series.points, x, y, style)
    return [
        *_paths(series.points, x, y, f"{style} raw"),
        *_paths(_means(series.points, series.window), x, y, style),
    ]


def _paths(points: Sequence[Point], x: Scale, y: Scale, style: str) -> list[str]:
    """Returns one polyline per stretch without a gap."""
    stretches: list[list[Point]] = [[]]
    for step, value in downsample(points, MAX_POINTS):
        if math.isfinite(value):
            stretches[-1].append((step, value))
        elif stretches[-1]:
            stretches.append([])
    return [
        f'<polyline class="{style}" points="{" ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in stretch)}"/>'
        for stretch in stretches
        if len(stretch) > 1
    ]


def downsample(points: Sequence[Point], count: int) -> list[Point]:
    """Returns at most about `count` points, the lowest and the highest of each bin, so that no spike is lost."""
    if len(points) <= count:
        return list(points)
    size = math.ceil(2 * len(points) / count)
    thinned: list[Point] = []
    for i in range(0, len(points), size):
        group = points[i : i + size]
        bad = next((p for p in group if not math.isfinite(p[1])), None)
        chosen = {f(group, key=lambda point: point[1]) for f in (min, max)} if bad is None else {bad}
        thinned += sorted(chosen)
    return thinned


def _means(points: Sequence[Point], window: int) -> list[Point]:
    """Returns the mean of `window` values around each value, of fewer at the ends. Gaps are preserved."""
    values = np.array([value for _, value in points])
    finite, kernel = np.isfinite(values), np.ones(window)
    sums, counts = (np.convolve(x, kernel, "same") for x in (np.where(finite, values, 0), finite))
    return [
        (step, float(total / count) if math.isfinite(value) else value)
        for (step, value), total, count in zip(points, sums, counts, strict=True)
    ]
