"""The page of `spmdkit verify --html FILE`: every case and every mutant. Uses only the report (`--json`)."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from spmdkit.foundation.formatting import format_error
from spmdkit.metrics.report.page import (
    KEEP,
    NUMBER,
    WIDE,
    cards,
    heading,
    mark,
    page,
    paragraph,
    section,
    table,
)
from spmdkit.verify.cases import describe_case
from spmdkit.verify.table import ERRORS, tolerance_text


def verify_page(report: Mapping[str, Any]) -> str:
    """Returns the page of a report of `verify`."""
    cases, mutants = report["cases"], report["mutants"]
    name = f"verify of {Path(report['task']).name}"
    equal, caught = sum(c["passed"] for c in cases), sum(m["caught"] for m in mutants)
    pill = ("good", "passed") if report["passed"] else ("bad", "failed")
    skipped = [(describe_case(case["mesh"], case["microbatches"]), case["reason"]) for case in report["skipped"]]
    not_applicable = [(mutant["name"], mutant["reason"]) for mutant in report["not_applicable"]]
    errors = [c["gradient_error"] for c in cases if c.get("gradient_error") is not None]
    facts = [
        ("cases equal to one device", f"{equal} of {len(cases)}"),
        ("mutants caught", f"{caught} of {len(mutants)}" if mutants else ""),
        ("largest gradient error", format_error(max(errors)) if errors else ""),
        ("gradient tolerance", format_error(report["tolerances"]["gradient"])),
    ]
    notes = [*report["notes"], "Errors are relative to one device.", tolerance_text(report)]
    body = [
        heading(name, [pill], [report["task"], report["dtype"], f"{report['seconds']:.0f} s"]),
        cards(facts),
        section("Cases", _cases(report) + "".join(map(paragraph, notes))),
        section("Differences", "".join(_difference(case) for case in cases if not case["passed"]))
        if equal < len(cases)
        else "",
        section("Skipped cases", table({"case": KEEP, "reason": WIDE}, skipped)) if skipped else "",
        section("Mutants", _mutants(mutants)) if mutants else "",
        section("Mutants that are not applicable", table({"mutant": KEEP, "reason": WIDE}, not_applicable))
        if not_applicable
        else "",
    ]
    return page(name, body, "spmdkit verify")


def _cases(report: Mapping[str, Any]) -> str:
    rows = []
    for case in report["cases"]:
        errors = [case.get(f"{key}_error") for key in ERRORS.values()]
        shown = ["-" if error is None else format_error(error) for error in errors]
        outcome = mark("good", "equal") if case["passed"] else mark("bad", "differs")
        rows.append((describe_case(case["mesh"], case["microbatches"]), outcome, *shown))
    return table({"mesh / microbatches": KEEP, "result": KEEP} | dict.fromkeys(ERRORS, NUMBER), rows)


def _difference(case: Mapping[str, Any]) -> str:
    name, found = describe_case(case["mesh"], case["microbatches"]), case["diagnosis"]
    first = paragraph(case["located"]["text"]) if "located" in case else ""
    return (
        f'<div class="finding c1"><p><b>{escape(name)}: {escape(found["kind"])}</b></p><p>{escape(found["found"])}</p>'
        f"{first}{paragraph(found['repair'])}</div>"
    )


def _mutants(mutants: list[Mapping[str, Any]]) -> str:
    rows = [
        (
            mutant["name"],
            mark("good", mutant["by"]) if mutant["caught"] else mark("bad", f"missed: {mutant['by']}"),
            describe_case(mutant["mesh"], mutant["microbatches"]) if "mesh" in mutant else "",
            mutant.get("description", ""),
        )
        for mutant in mutants
    ]
    return table({"mutant": KEEP, "caught by": KEEP, "mesh": KEEP, "injected bug": WIDE}, rows)
