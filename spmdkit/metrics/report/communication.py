"""The page of `spmdkit bench communication`, and that section of a run's report: the table, loss over bytes, time. Uses
only `communication.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from spmdkit.foundation.formatting import counted, format_bytes, format_seconds, format_value
from spmdkit.mesh.mesh import describe_mesh
from spmdkit.metrics.report.chart import BOTTOM, LEFT, RIGHT, TOP, Scale, axes
from spmdkit.metrics.report.page import (
    KEEP,
    NUMBER,
    fact_table,
    heading,
    large,
    page,
    paragraph,
    section,
    table,
)

Row = Mapping[str, Any]


def communication_page(result: Mapping[str, Any]) -> str:
    """Returns the page of a result (`spmdkit bench communication --json`)."""
    name = f"communication of {Path(result['config'] or 'a config').name}"
    lead = [
        *(
            counted(result["devices"], "device"),
            counted(result["replicas"], "replica"),
            f"batch {result['batch_size']}",
        ),
        *(counted(result["steps"], "step"), counted(len(result["seeds"]), "seed"), f"loss: {result['loss_is']}"),
    ]
    facts = {key: result[key] for key in ("device", "processes", "config", "jax", "time")}
    body = [
        heading(name, [], lead),
        *_sections(result),
        section("Facts", fact_table([("mesh", describe_mesh(result["mesh"])), *facts.items()])),
    ]
    return page(name, body, "spmdkit bench communication")


def communication_section(result: Mapping[str, Any] | None) -> str:
    """Returns the section for a run's report, or an empty string if the file is not a result."""
    if result is None:
        return ""
    try:
        return "\n".join(_sections(result))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        return section("Communication", paragraph("communication.json is not as spmdkit bench writes it.", "none"))


def _sections(result: Mapping[str, Any]) -> list[str]:
    rows = [row for row in result["rows"] if not row["refused"]]
    notes = [f"{row['name']}: refused: {row['refused']}" for row in result["rows"] if row["refused"]]
    notes += [f"{row['name']}: {text}" for row in result["rows"] for text in row.get("notes", ())]
    notes.append(
        "Bytes: sent by one device per step of a long run, counted in the compiled programs. Time: blocks of steps are "
        "trained in turns, and each is divided by the neighboring block of sum; the median and its 95% interval."
    )
    columns = ("bytes/step", "bytes / sum", "step time", "time / sum", "95% interval", "loss", "loss over sum")
    shown = table({"reducer or sync": KEEP, **dict.fromkeys(columns, NUMBER)}, map(_cells, rows))
    return [
        section("Communication", shown + "".join(map(paragraph, notes))),
        section("Loss over bytes", large(partial(loss_over_bytes, rows), 360)),
    ]


def _cells(row: Row) -> list[str]:
    shown: Callable[[Any, Callable[[Any], str]], str] = lambda value, form: "?" if value is None else form(value)
    interval = row["time_interval"]
    return [
        str(row["name"]),
        shown(row["bytes_per_step"], format_bytes),
        shown(row["bytes_over_sum"], lambda x: f"{x:.4g}"),
        shown(row["step_s"], format_seconds),
        shown(row["time_over_sum"], lambda x: f"{x:.2f}"),
        f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "",
        shown(row["loss_mean"], format_value),
        shown(row["loss_more_mean"], lambda x: f"{x:+.2%}"),
    ]


def loss_over_bytes(rows: Sequence[Row], width: int, height: int) -> str:
    """Returns an SVG with a point for each row: x: bytes per step (logarithmic), y: loss, vertical line: range over
    seeds."""
    drawn = [row for row in rows if row["bytes_per_step"] and row["loss_mean"] is not None]
    if not drawn:
        return paragraph("No row has both bytes and a finite loss.", "none")
    sent = [float(row["bytes_per_step"]) for row in drawn]
    losses = [x for row in drawn for x in map(float, row["loss"])]
    spread = max((max(losses) - min(losses)) * 0.15, abs(losses[0]) * 0.01) or 1.0
    x = Scale(min(sent) / 1.6, max(sent) * 1.6, LEFT, width - RIGHT, log=True)
    y = Scale(min(losses) - spread, max(losses) + spread, height - BOTTOM, TOP)
    powers = [2.0**n for n in range(math.ceil(math.log2(x.low)), math.floor(math.log2(x.high)) + 1)]
    across = {tick: format_bytes(tick) for tick in powers[:: max(1, math.ceil(len(powers) * 90 / width))]}
    up = {tick: f"{tick:.6g}" for tick in y.ticks()}
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="loss over bytes of a step">',
        *axes(x, y, across, up, "bytes of a step (log scale)", "loss"),
    ]
    taken: list[tuple[float, float, float]] = []
    for row in sorted(drawn, key=lambda row: row["loss_mean"]):
        at_x, at_y = x(float(row["bytes_per_step"])), y(float(row["loss_mean"]))
        low, high = y(min(map(float, row["loss"]))), y(max(map(float, row["loss"])))
        parts.append(f'<line class="axis" x1="{at_x:.1f}" x2="{at_x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
        name = f"{row['name']}: {format_bytes(row['bytes_per_step'])} a step, loss {format_value(row['loss_mean'])}"
        kind, title = "c1" if row["name"] == "sum" else "c0", f"<title>{escape(name)}</title>"
        parts.append(f'<circle class="{kind}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="5">{title}</circle>')
        parts.append(_label(str(row["name"]), at_x, at_y, width, taken))
    return "\n".join([*parts, "</svg>"])


def _label(name: str, at_x: float, at_y: float, width: int, taken: list[tuple[float, float, float]]) -> str:
    """Returns the label of a point, moved down to avoid other labels."""
    before, wide = at_x > width * 0.6, 7.0 * len(name)
    left = at_x - 9 - wide if before else at_x + 9
    place = at_y + 4
    while any(abs(place - y) < 13 and left < end and begin < left + wide for begin, end, y in taken):
        place += 13
    taken.append((left, left + wide, place))
    end = ' text-anchor="end"' if before else ""
    return f'<text x="{at_x + (-9 if before else 9):.1f}" y="{place:.1f}"{end}>{escape(name)}</text>'
