"""`drill.html`: a drill on one page: the times of the faults, the activity of each process, and the cost. Uses only
`drill.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from spmdkit.foundation.formatting import counted, format_seconds, format_share
from spmdkit.metrics.report.chart import Scale
from spmdkit.metrics.report.page import (
    KEEP,
    NUMBER,
    WIDE,
    cards,
    fact_table,
    heading,
    large,
    page,
    section,
    table,
)

KINDS = {
    "start": ("c7", "starting"),
    "compile": ("c3", "compiling"),
    "restore": ("c5", "restoring"),
    "step": ("c2", "steps"),
    "wait": ("faint", "waiting for others"),
    "evaluate": ("c4", "evaluating"),
    "save": ("c0", "saving"),
    "end": ("c8", "ending"),
    "left": ("faint hollow", "exited"),
    "dead": ("c6", "dead"),
    "restart": ("c1 hollow", "until the next start"),
}
"""Kind of bar -> (its classes in the style sheet, text of the legend)."""
LEFT, RIGHT, ROW, TOP, BOTTOM = 34, 8, 24, 12, 26


def drill_page(result: Mapping[str, Any]) -> str:
    """Returns the page of a drill's result (`spmdkit drill --json`)."""
    name = f"drill of {Path(result['config']).name}"
    pill = ("good", "passed") if result["passed"] else ("bad", "failed")
    lead = [
        *(counted(result["processes"], "process"), counted(result["steps"], "step")),
        f"{result['fired']} of {counted(result['requested'], 'fault')} injected",
        *(counted(result["attempts"], "start"), f"seed {result['seed']}"),
    ]
    with_faults, without = result["bars"], result["undisturbed_bars"]
    body = [
        heading(name, [pill], lead),
        _summary(result),
        section("Why it failed", "".join(f'<p class="finding c1">{escape(text)}</p>' for text in result["why"]))
        if result["why"]
        else "",
        section("With the faults", _time_line(with_faults, result["faults"])),
        section("The same job without a fault", _time_line(without, [])),
        section("Faults", _faults(result["faults"])),
        section("Facts", fact_table(_facts(result))),
    ]
    return page(name, body, "spmdkit drill")


def _summary(result: Mapping[str, Any]) -> str:
    seconds: Callable[[str], str] = lambda key: format_seconds(result[key]["median"]) if result[key] else ""
    is_equal = result["same_parameters"] and result["same_metrics"]
    return cards(
        [
            ("detection, median", seconds("detection_s")),
            ("recovery, median", seconds("recovery_s")),
            ("steps repeated", str(result["steps_lost"])),
            ("goodput", f"{result['goodput']:.1%}" if result["goodput"] is not None else ""),
            ("state and metrics", "bitwise equal" if is_equal else "different"),
        ]
    )


def _time_line(bars: Sequence[Sequence[Sequence[Any]]], faults: Sequence[Mapping[str, Any]]) -> str:
    """Returns a legend, with the share of each kind in the total time of all processes, and a row per process."""
    seconds = {kind: sum(bar[2] - bar[1] for row in bars for bar in row if bar[0] == kind) for kind in KINDS}
    total = sum(seconds.values()) or 1.0
    keys = [
        f'<span class="swatch {KINDS[kind][0]}">{KINDS[kind][1]} {format_share(spent / total)}</span>'
        for kind, spent in seconds.items()
        if spent > 0
    ]
    keys += ["<span>&#9660; fault</span>"] if faults else []
    drawn = large(lambda width, _: _draw(bars, faults, width), 0)
    return f'<div class="legend">{"".join(keys)}</div>{drawn}'


def _draw(bars: Sequence[Sequence[Sequence[Any]]], faults: Sequence[Mapping[str, Any]], width: int) -> str:
    """Returns an SVG: one row per process, x: seconds, marks: faults.

    Args:
        bars: per process `[kind, begin_s, end_s]`.
        faults: with `at_s`, `process`, `fault`.
    """
    end = max((bar[2] for row in bars for bar in row), default=1.0) or 1.0
    x, base = Scale(0.0, end, LEFT, width - RIGHT, gap=70), TOP + ROW * len(bars)
    parts = [
        f'<svg class="timeline" viewBox="0 0 {width} {base + BOTTOM}" role="img" aria-label="work of each process">'
    ]
    for tick in x.ticks():
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP - 4}" y2="{base}"/>')
        anchor = "end" if x(tick) > width - 30 else "middle"
        parts.append(f'<text x="{x(tick):.1f}" y="{base + 16}" text-anchor="{anchor}">{tick:g} s</text>')
    for process, row in enumerate(bars):
        y = TOP + ROW * process
        parts.append(f'<text x="0" y="{y + 15}">p{process}</text>')
        for kind, begin, stop in row:
            wide = x(stop) - x(begin)
            if wide < 0.15:
                continue
            style, name = KINDS[kind]
            parts.append(
                f'<rect class="{style}" x="{x(begin):.1f}" y="{y + 2}" width="{max(wide, 0.4):.1f}" height="{ROW - 6}">'
                f"<title>p{process} {name}, {begin:.1f} to {stop:.1f} s</title></rect>"
            )
    for fault in faults:
        at, y = x(fault["at_s"]), TOP + ROW * fault["process"]
        parts.append(
            f'<g class="fault"><line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 3}" y2="{y + ROW - 3}"/>'
            f'<path d="M{at - 5:.1f} {y - 9} h10 l-5 8 z"/>'
            f"<title>{escape(str(fault['fault']))} at {fault['at_s']:.1f} s, step {fault['step']}</title></g>"
        )
    return "".join([*parts, "</svg>"])


def _faults(faults: Sequence[Mapping[str, Any]]) -> str:
    seconds: Callable[[float | None], str] = lambda x: "" if x is None else format_seconds(x)
    columns = dict.fromkeys(("fault", "process", "phase"), KEEP)
    columns |= dict.fromkeys(("time", "step", "detected after", "recovered after", "steps repeated"), NUMBER)
    rows = [
        (
            *(f["fault"], f"p{f['process']}", f["phase"], f"{f['at_s']:.1f} s", f["step"], seconds(f["detection_s"])),
            "overtaken" if f["overtaken"] else seconds(f["recovery_s"]),
            "" if f["steps_lost"] is None else f["steps_lost"],
            f["failed"] or f["detected_by"] or "",
        )
        for f in faults
    ]
    return table(columns | {"detected by": WIDE}, rows)


def _facts(result: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [
        ("config", result["config"]),
        ("exit code", result["exit_code"]),
        (
            "time from the first step to the end",
            f"{result['work_s']:.1f} s (without a fault {result['undisturbed_work_s']:.1f} s)",
        ),
        ("time until the first step, without a fault", f"{result['undisturbed_start_s']:.1f} s"),
        ("goodput", "time without a fault / time with the faults" if result["goodput"] is not None else ""),
        ("differences", "; ".join(result["different"])),
        ("folder", result["folder"]),
        ("date", result["time"]),
    ]
