"""`drill.html`: a drill on one page: the times of the faults, the activity of each process, and the cost. Uses only
`drill.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from spmdkit.foundation.formatting import format_seconds
from spmdkit.metrics.report.chart import linear_ticks
from spmdkit.metrics.report.page import KEEP, NUMBER, WIDE, cards, fact_table, heading, page, paragraph, section, table

KINDS = {
    "start": ("#9aa7b8", "starting"),
    "compile": ("#8b5cf6", "compiling"),
    "restore": ("#0ea5a4", "restoring"),
    "step": ("#2f9e5b", "steps"),
    "wait": ("#cfd6df", "waiting for others"),
    "evaluate": ("#d9922b", "evaluating"),
    "save": ("#2563eb", "saving"),
    "end": ("#5b7a99", "ending"),
    "left": ("#e8ecf1", "exited"),
    "dead": ("#1b2330", "dead"),
    "restart": ("#f0b8b8", "until the next start"),
}
"""Kind of bar -> (color, text of the legend)."""
WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 940, 34, 8, 24, 30, 26


def drill_page(result: Mapping[str, Any]) -> str:
    """Returns the page of a drill's result (`spmdkit drill --json`)."""
    name = f"drill of {result['config']}"
    pill = ("good", "passed") if result["passed"] else ("bad", "failed")
    lead = [
        *(f"{result['processes']} processes", f"{result['steps']} steps"),
        f"{result['fired']} of {result['requested']} faults injected",
        *(f"{result['attempts']} starts", f"seed {result['seed']}"),
    ]
    with_faults, without = result["bars"], result["undisturbed_bars"]
    body = [
        heading(name, [pill], lead),
        _summary(result),
        section("Why it failed", "".join(map(paragraph, result["why"]))) if result["why"] else "",
        section("With the faults", _legend(with_faults) + time_line(with_faults, result["faults"])),
        section("Without a fault, the same job", _legend(without) + time_line(without, [])),
        section("Faults", _faults(result["faults"])),
        section("Facts", fact_table(_facts(result))),
        "<footer>Made by spmdkit from drill.json.</footer>",
    ]
    return page(f"{name} - spmdkit", "\n".join(part for part in body if part))


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


def _legend(bars: Sequence[Sequence[Sequence[Any]]]) -> str:
    """Returns the legend of a time line, with the share of each kind in the total time of all processes."""
    seconds = {kind: sum(bar[2] - bar[1] for row in bars for bar in row if bar[0] == kind) for kind in KINDS}
    total = sum(seconds.values()) or 1.0
    box = "display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:6px;vertical-align:-1px"
    keys = (
        f'<span><i style="{box};background:{KINDS[kind][0]}"></i>{KINDS[kind][1]} {spent / total:.0%}</span>'
        for kind, spent in seconds.items()
        if spent > 0
    )
    return f'<div class="legend">{"".join(keys)}</div>'


def time_line(bars: Sequence[Sequence[Sequence[Any]]], faults: Sequence[Mapping[str, Any]]) -> str:
    """Returns an SVG: one row per process, x: seconds, marks: faults.

    Args:
        bars: per process `[kind, begin_s, end_s]`.
        faults: with `at_s`, `process`, `fault`.
    """
    end = max((bar[2] for row in bars for bar in row), default=1.0) or 1.0
    across = (WIDTH - LEFT - RIGHT) / end
    height = TOP + ROW * len(bars) + BOTTOM
    parts = [
        f'<svg class="chart timeline" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="what each process did">'
    ]
    base = TOP + ROW * len(bars)
    for tick in linear_ticks(0, end):
        x = LEFT + tick * across
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{base}"/>')
        anchor = "end" if x > WIDTH - 30 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="{anchor}">{tick:g} s</text>')
    for process, row in enumerate(bars):
        y = TOP + ROW * process
        parts.append(f'<text x="0" y="{y + 15}">p{process}</text>')
        for kind, begin, stop in row:
            wide = (stop - begin) * across
            if wide < 0.15:
                continue
            parts.append(
                f'<rect x="{LEFT + begin * across:.1f}" y="{y + 2}" width="{max(wide, 0.4):.1f}" height="{ROW - 6}" '
                f'fill="{KINDS[kind][0]}"><title>p{process} {KINDS[kind][1]}, {begin:.1f} to {stop:.1f} s</title></rect>'
            )
    for fault in faults:
        x, y = LEFT + fault["at_s"] * across, TOP + ROW * fault["process"]
        parts.append(
            f'<g class="fault"><line class="bad" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 3}" y2="{y + ROW - 3}"/>'
            f'<path d="M{x - 4:.1f} {y - 9} h8 l-4 7 z" fill="#dc2626"/>'
            f"<title>{escape(str(fault['fault']))} at {fault['at_s']:.1f} s, step {fault['step']}</title></g>"
        )
    return "".join([*parts, "</svg>"])


def _faults(faults: Sequence[Mapping[str, Any]]) -> str:
    seconds: Callable[[float | None], str] = lambda x: "" if x is None else format_seconds(x)
    columns = dict.fromkeys(("fault", "process", "while"), KEEP)
    columns |= dict.fromkeys(("at", "step", "noticed after", "continues after", "steps lost"), NUMBER)
    rows = [
        (
            *(f["fault"], f"p{f['process']}", f["phase"], f"{f['at_s']:.1f} s", f["step"], seconds(f["detection_s"])),
            "overtaken" if f["overtaken"] else seconds(f["recovery_s"]),
            "" if f["steps_lost"] is None else f["steps_lost"],
            f["failed"] or f["detected_by"] or "",
        )
        for f in faults
    ]
    return table(columns | {"noticed by": WIDE}, rows)


def _facts(result: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [
        ("exit code", result["exit_code"]),
        (
            "seconds from the first step to the end",
            f"{result['work_s']:.1f} (without a fault {result['undisturbed_work_s']:.1f})",
        ),
        ("seconds until the first step, without a fault", f"{result['undisturbed_start_s']:.1f}"),
        ("goodput", "the second of these over the first" if result["goodput"] is not None else ""),
        ("differences", "; ".join(result["different"])),
        ("folder", result["folder"]),
        ("made", result["time"]),
    ]
