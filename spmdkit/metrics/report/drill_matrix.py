"""`matrix.html`: the result of `spmdkit drill --matrix` on one page: a row per kind and number of processes, a column per
phase. Uses only `matrix.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spmdkit.foundation.formatting import counted, format_seconds
from spmdkit.metrics.report.page import KEEP, SHORT, WIDE, cards, heading, mark, page, paragraph, section, table

MEANING = (
    "A cell is a run with one fault: the time from the fault until it is detected, the time until training continues, "
    "and the steps that are repeated."
)


def matrix_page(result: Mapping[str, Any]) -> str:
    """Returns the page of a matrix (`spmdkit drill CONFIG --matrix --json`)."""
    name = f"fault matrix of {Path(result['config']).name}"
    pill = ("good", "passed") if result["passed"] else ("bad", "goals missed")
    facts = [counted(result["num_cells"], "cell"), result["date"], result["machine"]]
    missed = [(row["cell"], "; ".join(row["missed"])) for row in result["cells"] if row["missed"]]
    reasons = [(each["cell"], each["why"]) for each in result["not_applicable"]]
    body = [
        heading(name, [pill], facts),
        cards(_summary(result)),
        section("Cells", paragraph(MEANING) + table(*_cells(result))),
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
    columns = {"fault / processes": KEEP} | dict.fromkeys(phases, SHORT)
    return columns, [
        (f"{kind} / {num}", *(texts.get((kind, num, phase), "") for phase in phases)) for kind, num in lines
    ]


def _text(row: Mapping[str, Any]) -> str:
    if row["missed"]:
        return mark("bad", "missed")
    times = {"detected": row["detection_s"], "recovered": row["recovery_s"]}
    lines = [f"{name} {format_seconds(seconds)}" for name, seconds in times.items() if seconds is not None]
    return "\n".join(line.replace(" ", "\N{NO-BREAK SPACE}") for line in (*lines, f"repeated {row['steps_repeated']}"))
