"""The page of `spmdkit bench communication`, and the section of a run's report: the table, loss over bytes, time. Made
from `communication.json` alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from spmdkit.foundation.formatting import format_bytes, format_seconds, format_value
from spmdkit.mesh.mesh import describe_mesh
from spmdkit.metrics.report.chart import Scale
from spmdkit.metrics.report.page import fact_table, page, section, table

Row = Mapping[str, Any]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 880, 360, 78, 24, 20, 46
BAR, NAMES = 30, 250
NUMBER = ' class="number keep"'


def communication_page(result: Mapping[str, Any]) -> str:
    """Returns the page of a result (`spmdkit bench communication --json`)."""
    name = f"communication of {Path(result['config'] or 'a config').name}"
    body = [
        f"<header><h1>{escape(name)}</h1></header>",
        f'<p class="lead">{escape(_lead(result))}</p>',
        *_sections(result),
        section("Facts", fact_table(_facts(result))),
        "<footer>Made by spmdkit from communication.json.</footer>",
    ]
    return page(f"{name} - spmdkit", "\n".join(body))


def _facts(result: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [
        ("mesh", describe_mesh(result["mesh"])),
        *((key, result[key]) for key in ("device", "processes", "config", "jax", "time")),
    ]


def communication_section(result: Mapping[str, Any] | None) -> str:
    """Returns what a run's report shows of a result, or nothing where the file is none."""
    if result is None:
        return ""
    try:
        return "\n".join(_sections(result))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        return section("Communication", '<p class="none">communication.json is not as spmdkit bench writes it.</p>')


def _lead(result: Mapping[str, Any]) -> str:
    seeds = len(result["seeds"])
    return (
        f"{result['devices']} devices, {result['replicas']} replicas, batch {result['batch_size']}, {result['steps']} "
        f"steps, "
        f"{seeds} seed{'s' * (seeds > 1)}; loss: {result['loss_is']}"
    )


def _sections(result: Mapping[str, Any]) -> list[str]:
    rows = [row for row in result["rows"] if not row["refused"]]
    note = (
        "Bytes are what one device sends in a step of a long run, read from the compiled programs. Time is of blocks "
        "trained in turns, over the neighbouring "
        "block of sum: the median, and its 95 % interval."
    )
    return [
        section("Communication", _table(result["rows"]) + _notes(result["rows"]) + f'<p class="note after">{note}</p>'),
        section("Loss over bytes", loss_over_bytes(rows)),
        section("Time of a step over that of sum", times(rows)),
    ]


def _table(rows: Sequence[Row]) -> str:
    names = ("bytes/step", "of sum", "time/step", "of sum", "95 %", "loss", "over sum")
    head = [("", ""), *((name, NUMBER) for name in names)]
    return table(head, [_line(row) for row in rows if not row["refused"]])


def _line(row: Row) -> str:
    name = f'<td class="keep">{escape(str(row["name"]))}</td>'
    known = lambda value, form: "?" if value is None else form(value)
    interval = row["time_interval"]
    cells = [
        known(row["bytes_per_step"], format_bytes),
        known(row["bytes_over_sum"], lambda x: f"{x:.4f}"),
        known(row["step_s"], format_seconds),
        known(row["time_over_sum"], lambda x: f"{x:.2f}"),
        f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "",
        known(row["loss_mean"], format_value),
        known(row["loss_more_mean"], lambda x: f"{x:+.2%}"),
    ]
    return "<tr>" + name + "".join(f"<td{NUMBER}>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _notes(rows: Sequence[Row]) -> str:
    refused = [f"{row['name']}: refused: {row['refused']}" for row in rows if row["refused"]]
    notes = [*refused, *(f"{row['name']}: {note}" for row in rows for note in row.get("notes", ()))]
    return "".join(f'<p class="note after">{escape(text)}</p>' for text in notes)


def loss_over_bytes(rows: Sequence[Row]) -> str:
    """Returns an SVG: a point for each row, the bytes of a step to the right (by logarithm), the loss upwards, the
    seeds' least and most as a line."""
    drawn = [row for row in rows if row["bytes_per_step"] and row["loss_mean"] is not None]
    if not drawn:
        return '<p class="none">No row has both bytes and a finite loss.</p>'
    sent, losses = (
        [float(row["bytes_per_step"]) for row in drawn],
        [x for row in drawn for x in map(float, row["loss"])],
    )
    spread = (max(losses) - min(losses)) * 0.15 or abs(losses[0]) * 0.1 or 1.0
    x = Scale(min(sent) / 1.6, max(sent) * 1.6, LEFT, WIDTH - RIGHT, log=True)
    y = Scale(min(losses) - spread, max(losses) + spread, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="loss over bytes of a step">',
        *_axes(x, y),
    ]
    taken: list[tuple[float, float, float]] = []
    for row in sorted(drawn, key=lambda row: row["loss_mean"]):
        at_x, at_y = x(float(row["bytes_per_step"])), y(float(row["loss_mean"]))
        low, high = y(min(map(float, row["loss"]))), y(max(map(float, row["loss"])))
        parts.append(f'<line class="axis" x1="{at_x:.1f}" x2="{at_x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
        notes = f"{row['name']}: {format_bytes(row['bytes_per_step'])} a step, loss {format_value(row['loss_mean'])}"
        kind = "eval" if row["name"] == "sum" else "train"
        parts.append(
            f'<circle class="{kind}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="5"><title>{escape(notes)}</title></circle>'
        )
        parts.append(_label(str(row["name"]), at_x, at_y, taken))
    return "\n".join([*parts, "</svg>"])


def _label(name: str, at_x: float, at_y: float, taken: list[tuple[float, float, float]]) -> str:
    """Returns a point's name beside it, moved down where another stands."""
    before, wide = at_x > WIDTH * 0.7, 7.0 * len(name)
    left = at_x - 9 - wide if before else at_x + 9
    place = at_y + 4
    while any(abs(place - y) < 13 and left < end and begin < left + wide for begin, end, y in taken):
        place += 13
    taken.append((left, left + wide, place))
    end = ' text-anchor="end"' if before else ""
    return f'<text x="{at_x + (-9 if before else 9):.1f}" y="{place:.1f}"{end}>{escape(name)}</text>'


def _axes(x: Scale, y: Scale) -> list[str]:
    bottom, parts = HEIGHT - BOTTOM, list[str]()
    for tick in y.ticks():
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    for tick in _powers(x.low, x.high):
        parts.append(f'<line class="axis" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{bottom + 19}" text-anchor="middle">{format_bytes(tick)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">bytes of a step (log '
        f"scale)</text>"
    )
    parts.append(
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">loss</text>'
    )
    return parts


def _powers(low: float, high: float, most: int = 8) -> list[float]:
    """Returns powers of two between `low` and `high`, at most so many: bytes are read in KiB."""
    found = [2.0**n for n in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    return found[:: max(1, math.ceil(len(found) / most))]


def times(rows: Sequence[Row]) -> str:
    """Returns an SVG: a bar for each row from 0 to the ratio of its time, its 95 % interval as a line, and a line at 1,
    where `sum` is."""
    drawn = [row for row in rows if row["time_over_sum"] is not None]
    if not drawn:
        return '<p class="none">No time was measured.</p>'
    most = max(1.0, *(float(x) for row in drawn for x in (row["time_over_sum"], *(row["time_interval"] or ()))))
    x = Scale(0.0, most * 1.08, NAMES, WIDTH - RIGHT)
    height = TOP + BAR * len(drawn) + BOTTOM - 16
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="time of a step over that of sum">'
    ]
    base = TOP + BAR * len(drawn)
    for tick in x.ticks():
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP - 6}" y2="{base}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{base + 18}" text-anchor="middle">{tick:g}</text>')
    for number, row in enumerate(drawn):
        y, ratio = TOP + BAR * number, float(row["time_over_sum"])
        colour = "var(--eval)" if row["name"] == "sum" else "var(--train)"
        parts.append(f'<text x="{NAMES - 10}" y="{y + 17}" text-anchor="end">{escape(str(row["name"]))}</text>')
        parts.append(
            f'<rect x="{NAMES}" y="{y + 4}" width="{x(ratio) - NAMES:.1f}" height="{BAR - 12}" '
            f'fill="{colour}"><title>{ratio:.3f}</title></rect>'
        )
        if row["time_interval"]:
            low, high = (x(float(bound)) for bound in row["time_interval"])
            parts.append(
                f'<line class="axis" x1="{low:.1f}" x2="{high:.1f}" y1="{y + 13}" y2="{y + 13}" '
                f'style="stroke:var(--ink);stroke-width:2"/>'
            )
    if math.isfinite(x(1.0)):
        parts.append(f'<line class="axis" x1="{x(1.0):.1f}" x2="{x(1.0):.1f}" y1="{TOP - 6}" y2="{base}"/>')
    return "\n".join([*parts, "</svg>"])
