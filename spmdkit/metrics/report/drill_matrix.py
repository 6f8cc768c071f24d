"""`matrix.html`: the result of `spmdkit drill --matrix` on one page: a row per kind and number of processes, a column per
phase. Uses only `matrix.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spmdkit.foundation.formatting import format_seconds
from spmdkit.metrics.report.page import KEEP, SHORT, WIDE, cards, heading, mark, page, section, table


def matrix_page(result: Mapping[str, Any]) -> str:
    """Returns the page of a matrix (`spmdkit drill CONFIG --matrix --json`)."""
    name = f"fault matrix of {Path(result['config']).name}"
    pill = ("good", "passed") if result["passed"] else ("bad", "goals missed")
    facts = [f"{result['num_cells']} cells", result["date"], result["machine"]]
    missed = [(row["cell"], "; ".join(row["missed"])) for row in result["cells"] if row["missed"]]
    reasons = [(each["cell"], each["why"]) for each in result["not_applicable"]]
    body = [
        heading(name, [pill], facts),
        cards(_summary(result)),
        section("Detection time, recovery time, steps repeated", table(*_cells(result))),
        section("Cells that miss a goal", table({"cell": KEEP, "reason": WIDE}, missed)) if missed else "",
        section("Not applicable", table({"cell": KEEP, "reason": WIDE}, reasons)) if reasons else "",
    ]
    return page(name, body, "spmdkit drill --matrix")


def _summary(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    median: Callable[[str], str] = lambda key: format_seconds(result[key]["median"]) if result[key] else ""
    return [
        ("process at fault named", f"{result['named']} of {result['num_named']}"),
        ("bitwise equal", f"{result['bitwise_equal']} of {result['num_cells']}"),
        ("detection, median", median("detection_s")),
        ("recovery, median", median("recovery_s")),
    ]


def _cells(result: Mapping[str, Any]) -> tuple[dict[str, str], list[tuple[str, ...]]]:
    rows = result["cells"]
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    texts = {(row["kind"], row["num_processes"], row["phase"]): _text(row) for row in rows}
    lines = sorted({(row["kind"], row["num_processes"]) for row in rows})
    columns = {"fault": KEEP, "processes": KEEP} | dict.fromkeys(phases, SHORT)
    return columns, [(kind, str(num), *(texts.get((kind, num, phase), "") for phase in phases)) for kind, num in lines]


def _text(row: Mapping[str, Any]) -> str:
    if row["missed"]:
        return mark("bad", "missed")
    times = ["-" if row[key] is None else format_seconds(row[key]) for key in ("detection_s", "recovery_s")]
    return ", ".join(text.replace(" ", "\N{NO-BREAK SPACE}") for text in (*times, str(row["steps_repeated"])))
