"""The terminal report: a table of cases, a table of mutants, and the verdict, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spmdkit.foundation.formatting import all_visible, counted, format_error
from spmdkit.verify.cases import describe_case

WIDTH = 100
MAX_SKIPPED = 8
ERRORS = {
    "loss": "loss",
    "gradient": "gradient",
    "update": "update",
    "params": "parameter",
    "metrics": "metric",
    "eval": "eval",
    "restore": "restore",
}
"""Column -> the error of a case that it shows."""


def print_report(report: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Prints a report of `verify`."""
    console, report = Console(file=file, width=WIDTH, highlight=False), all_visible(report)
    _cases(console, report)
    for case in report["cases"]:
        if not case["passed"]:
            diagnosis = case["diagnosis"]
            console.print(f"[bold red]{describe_case(case['mesh'], case['microbatches'])}[/]: {diagnosis['kind']}")
            console.print(f"  {escape(diagnosis['found'])}")
            if located := case.get("located"):
                console.print(f"  [bold]first[/] {escape(located['text'])}")
            elif reason := case.get("not_located"):
                console.print(f"  [dim]not located: {escape(reason)}[/]")
            console.print(f"  [bold]repair[/] {escape(diagnosis['repair'])}")
    _plain(console, report.get("plain_jax", {}))
    if report["pattern"]:
        console.print(f"The cases that differ have in common: [bold]{report['pattern']}[/].")
    _skipped(console, report)
    _mutants(console, report)
    for note in report["notes"]:
        console.print(f"note: {escape(note)}")
    console.print(tolerance_text(report))
    console.print(_verdict(report))


def _cases(console: Console, report: Mapping[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("mesh / microbatches")
    for name in ERRORS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for case in report["cases"]:
        errors = [_number(case.get(f"{name}_error"), report["tolerances"][name]) for name in ERRORS.values()]
        equal = "[green]equal[/]" if case["passed"] else "[bold red]DIFFERS[/]"
        table.add_row(describe_case(case["mesh"], case["microbatches"]), *errors, equal)
    console.print(table)


def _plain(console: Console, found: Mapping[str, Any]) -> None:
    if not found:
        return
    if reason := found.get("not_applicable"):
        console.print(f"one device against plain JAX: [dim]not compared, {escape(reason)}[/]")
        return
    errors = f"loss {format_error(found['loss_error'])}, gradient {format_error(found['gradient_error'])}"
    if found["passed"]:
        console.print(f"one device against plain JAX: equal, {errors}")
    else:
        console.print(
            f"[bold red]one device against plain JAX: DIFFERS[/], {errors} (leaf '{escape(found['worst_leaf'])}'): "
            "jax.value_and_grad of the loss's value gives another one. A derivative is lost between sum and count; "
            "this is a bug of spmdkit, or a custom rule of yours."
        )


def _number(error: float | None, tolerance: float) -> str:
    if error is None:
        return "-"
    text = format_error(error)
    return text if error <= tolerance else f"[bold red]{text}[/]"


def _skipped(console: Console, report: Mapping[str, Any]) -> None:
    by_reason: dict[str, list[str]] = {}
    for case in report["skipped"]:
        by_reason.setdefault(case["reason"], []).append(describe_case(case["mesh"], case["microbatches"]))
    if not by_reason:
        return
    console.print(f"{len(report['skipped'])} of the cases could not be compared:")
    for reason, names in by_reason.items():
        more = f" and {len(names) - MAX_SKIPPED} more" if len(names) > MAX_SKIPPED else ""
        console.print(f"  {', '.join(names[:MAX_SKIPPED])}{more}: [dim]{escape(reason)}[/]")


def _mutants(console: Console, report: Mapping[str, Any]) -> None:
    if not report["mutants"] and not report["not_applicable"]:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("mutant", no_wrap=True)
    table.add_column("what it does")
    table.add_column("on")
    table.add_column("caught by", no_wrap=True)
    for mutant in report["mutants"]:
        by = (
            f"[green]{escape(mutant['by'])}[/]"
            if mutant["caught"]
            else f"[bold red]NOT CAUGHT: {escape(mutant['by'])}[/]"
        )
        mesh = describe_case(mutant["mesh"], mutant["microbatches"]) if "mesh" in mutant else ""
        table.add_row(mutant["name"], mutant.get("description", ""), mesh, by)
    if report["mutants"]:
        console.print(table)
    for mutant in report["mutants"]:
        if located := mutant.get("located"):
            console.print(f"  {mutant['name']}: {escape(located['text'])}")
    for mutant in report["not_applicable"]:
        console.print(f"  {mutant['name']}: [dim]not applicable, {escape(mutant['reason'])}[/]")


def tolerance_text(report: Mapping[str, Any]) -> str:
    """Returns a sentence on the tolerances of a report."""
    from spmdkit.verify.compare import FLOOR_ULPS
    from spmdkit.verify.noise import MULTIPLE

    return (
        f"Tolerance: gradient {report['tolerances']['gradient']:.1e}, loss {report['tolerances']['loss']:.1e}, "
        f"relative 2-norm per leaf, {report['dtype']}: the larger of {FLOOR_ULPS} ulps and {MULTIPLE} times what one "
        f"ulp in the input moves on one device (gradient {report['one_ulp_moves']['gradient']:.1e}). A restored state "
        "and the replicas' copies are equal bit for bit."
    )


def _verdict(report: Mapping[str, Any]) -> str:
    cases, mutants = report["cases"], report["mutants"]
    good, caught = sum(c["passed"] for c in cases), sum(m["caught"] for m in mutants)
    mutants_caught = f", {caught} of {counted(len(mutants), 'mutant')} caught" if mutants else ", no mutant tried"
    style = "bold green" if report["passed"] else "bold red"
    outcome = "passed" if report["passed"] else "failed"
    return (
        f"[{style}]{outcome}[/]: {good} of {counted(len(cases), 'case')} equal to one device{mutants_caught}, "
        f"{report['seconds']:.0f} s."
    )
