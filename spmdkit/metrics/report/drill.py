"""`drill.html`: a drill on one page: when faults were injected, what each process did, and what it cost. Made from
`drill.json` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from spmdkit.foundation.formatting import format_seconds
from spmdkit.metrics.report.page import cards, fact_table, page, section, table

COLOURS = {
    "start": "#9aa7b8",
    "compile": "#8b5cf6",
    "restore": "#0ea5a4",
    "step": "#2f9e5b",
    "wait": "#cfd6df",
    "evaluate": "#d9922b",
    "save": "#2563eb",
    "end": "#5b7a99",
    "left": "#e8ecf1",
    "dead": "#1b2330",
    "restart": "#f0b8b8",
}
WORDS = {
    "start": "starting",
    "compile": "compiling",
    "restore": "restoring",
    "step": "steps",
    "wait": "waiting for others",
    "evaluate": "evaluating",
    "save": "saving",
    "end": "ending",
    "left": "exited",
    "dead": "dead",
    "restart": "until the next start",
}
WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 940, 34, 8, 24, 30, 26


def drill_page(result: Mapping[str, Any]) -> str:
    """Returns the page of a drill's result (`spmdkit drill --json`)."""
    name = f"drill of {result['config']}"
    tone, word = ("good", "passed") if result["passed"] else ("bad", "failed")
    body = [
        f'<header><h1>{escape(name)}</h1><span class="pill {tone}">{word}</span></header>',
        f'<p class="lead">{_lead(result)}</p>',
        _summary(result),
        _failures(result["why"]),
        section("With the faults", _legend(result["bars"]) + time_line(result["bars"], result["faults"])),
        section(
            "Without a fault, the same job",
            _legend(result["undisturbed_bars"]) + time_line(result["undisturbed_bars"], []),
        ),
        section("Faults", _faults(result["faults"])),
        section("Facts", fact_table(_facts(result))),
        "<footer>Made by spmdkit from drill.json.</footer>",
    ]
    return page(f"{name} - spmdkit", "\n".join(part for part in body if part))


def _lead(result: Mapping[str, Any]) -> str:
    return (
        f"{result['processes']} processes, {result['steps']} steps, {result['fired']} of {result['requested']} faults "
        f"injected, {result['attempts']} starts, seed "
        f"{result['seed']}"
    )


def _summary(result: Mapping[str, Any]) -> str:
    seconds = lambda key: format_seconds(result[key]["median"]) if result[key] else ""
    same = result["same_parameters"] and result["same_metrics"]
    return cards(
        [
            ("detection, median", seconds("detection_s")),
            ("recovery, median", seconds("recovery_s")),
            ("steps repeated", str(result["steps_lost"])),
            ("goodput", f"{result['goodput']:.1%}" if result["goodput"] is not None else ""),
            ("state and metrics", "bitwise equal" if same else "different"),
        ]
    )


def _failures(why: Sequence[str]) -> str:
    return section("Why it failed", "".join(f'<p class="note">{escape(text)}</p>' for text in why)) if why else ""


def _legend(bars: Sequence[Sequence[Sequence[Any]]]) -> str:
    """Returns the legend of a time line, with the share of each kind in the time of all processes."""
    seconds = {kind: sum(bar[2] - bar[1] for row in bars for bar in row if bar[0] == kind) for kind in COLOURS}
    total = sum(seconds.values()) or 1.0
    keys = (
        f'<span><i style="display:inline-block;width:12px;height:12px;border-radius:2px;background:{COLOURS[kind]};margin-right:6px;vertical-align:-1px"></i>'
        f"{WORDS[kind]} {spent / total:.0%}</span>"
        for kind, spent in seconds.items()
        if spent > 0
    )
    return f'<div class="legend">{"".join(keys)}</div>'


def time_line(bars: Sequence[Sequence[Sequence[Any]]], faults: Sequence[Mapping[str, Any]]) -> str:
    """Returns an SVG: a row for each process, seconds to the right, faults as marks.

    Args:
        bars: of each process `[kind, begin_s, end_s]`.
        faults: with `at_s`, `process`, `fault`.
    """
    end = max((bar[2] for row in bars for bar in row), default=1.0) or 1.0
    across = (WIDTH - LEFT - RIGHT) / end
    height = TOP + ROW * len(bars) + BOTTOM
    parts = [
        f'<svg class="chart timeline" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="what each process did">'
    ]
    base = TOP + ROW * len(bars)
    for tick in _ticks(end):
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
                f'fill="{COLOURS[kind]}">'
                f"<title>p{process} {WORDS[kind]}, {begin:.1f} to {stop:.1f} s</title></rect>"
            )
    for fault in faults:
        x, y = LEFT + fault["at_s"] * across, TOP + ROW * fault["process"]
        parts.append(
            f'<g class="fault"><line class="bad" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 3}" y2="{y + ROW - 3}"/>'
            f'<path d="M{x - 4:.1f} {y - 9} h8 l-4 7 z" fill="#dc2626"/>'
            f"<title>{escape(str(fault['fault']))} at {fault['at_s']:.1f} s, step {fault['step']}</title></g>"
        )
    return "".join([*parts, "</svg>"])


def _ticks(end: float) -> list[float]:
    """Returns at most nine round numbers of seconds from 0 to `end`."""
    step = next(s for k in range(-1, 9) for s in (10.0**k, 2 * 10.0**k, 5 * 10.0**k) if end / s <= 8)
    return [round(n * step, 6) for n in range(int(end / step) + 1)]


def _faults(faults: Sequence[Mapping[str, Any]]) -> str:
    number = ' class="number"'
    seconds = lambda x: "" if x is None else format_seconds(x)
    rows = [
        "<tr>"
        + "".join(f'<td class="keep">{escape(str(text))}</td>' for text in (f["fault"], f"p{f['process']}", f["phase"]))
        + "".join(
            f"<td{number}>{escape(str(text))}</td>"
            for text in (
                f"{f['at_s']:.1f} s",
                f["step"],
                seconds(f["detection_s"]),
                "overtaken" if f["overtaken"] else seconds(f["recovery_s"]),
                "" if f["steps_lost"] is None else f["steps_lost"],
            )
        )
        + f"<td>{escape(f['failed'] or f['detected_by'] or '')}</td></tr>"
        for f in faults
    ]
    head = [("fault", ""), ("process", ""), ("while", ""), ("at", number), ("step", number), ("noticed after", number)]
    return table([*head, ("goes on after", number), ("steps lost", number), ("noticed by", "")], rows)


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
