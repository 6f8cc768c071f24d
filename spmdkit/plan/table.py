"""A plan on the terminal, at most 100 columns: whether it fits, bytes sent, the time of a step, findings."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spmdkit.foundation.formatting import (
    all_visible,
    counted,
    format_bytes,
    format_count,
    format_seconds,
    format_share,
    new_table,
    shown_source,
)
from spmdkit.mesh.mesh import describe_mesh
from spmdkit.metrics.report.plan import line_cells
from spmdkit.plan.error_bars import error_bar_text

WIDTH = 100
MAX_ROWS = 12
MAX_LINES = 10
NUMBER = re.compile(r"\d+")
"""Reasons that differ only in numbers are shown once."""
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def console() -> Console:
    """Returns the console for plans: as wide as the terminal, at most `WIDTH`."""
    result = Console(file=sys.stdout, highlight=False, soft_wrap=False)
    result.width = min(WIDTH, result.width) if result.is_terminal else WIDTH
    return result


def show(document: Mapping[str, Any], to: Console | None = None) -> None:
    """Prints a plan."""
    out, document = to or console(), all_visible(document)
    _show_head(document, out)
    _show_memory(document, out)
    _show_wire(document, out)
    _show_time(document, out)
    _show_lines(document, out)
    _show_findings(document, out)
    if document.get("candidates"):
        show_candidates(document["candidates"], out)
    for sentence in document["budget"]["exceeded"]:
        out.print(f"[bold red]over budget[/] {escape(sentence)}")
    for note in document["notes"]:
        out.print(f"[dim]note: {escape(note)}[/]")


def _show_head(document: Mapping[str, Any], out: Console) -> None:
    devices, parts, num = document["num_devices"], document["hosts_or_slices"], document["microbatches"]
    where = f", {parts} {'slices' if document['compiler'] == 'tpu' else 'hosts'}" if parts > 1 else ""
    out.print(
        f"[bold]{document['target']}[/]  {counted(devices, 'device')}{where}  "
        f"[bold]{describe_mesh(document['mesh'])}[/]  {format_count(document['num_params'])} parameters, batch "
        f"{document['batch_size']}{f' in {num} microbatches' if num > 1 else ''}"
    )
    for tiles in document.get("attention", ()):
        out.print(f"[dim]{tiles}[/]")


def _show_memory(document: Mapping[str, Any], out: Console) -> None:
    memory = document["memory"]
    peak, limit = memory["peak_bytes"], memory["limit_bytes"]
    verdict = "[bold green]fits[/]" if document["fits"] else "[bold red]does not fit[/]"
    out.print()
    out.print(
        f"[bold]Memory[/]  {verdict}: {format_bytes(peak)} of {format_bytes(limit)} a device ({peak / limit:.1%})"
    )
    table = _shares(memory["parts"], peak, format_bytes)
    for name, num in memory["host_parts"].items():
        table.add_row(f"{name} (host)", format_bytes(num), "", "")
    out.print(table)
    largest = memory["live"][:3]
    if largest:
        out.print("[dim]largest at the peak:[/]")
    for buffer in largest:
        out.print(f"[dim]  {format_bytes(buffer['bytes']):>10}  {buffer['shape']}  {shown_source(buffer['source'])}[/]")


def _show_wire(document: Mapping[str, Any], out: Console) -> None:
    rows = [row for row in document["collectives"] if row["counted"]]
    out.print()
    if not rows:
        out.print("[bold]Wire[/]  nothing" if document["collective_bytes"] == 0 else "[bold]Wire[/]  not known")
        return
    sent = _bytes_of(document["collective_bytes"], document["collective_bytes_at_least"])
    out.print(f"[bold]Wire[/]  bytes sent per device and step: {sent}")
    if (average := document["wire"].get("on_average")) is not None:
        most = format_bytes(document["wire"]["at_most"])
        out.print(
            f"      with what runs after some steps {format_bytes(average)} a step on average, at most {most} in one"
        )
    table = new_table("collective", "over", "link", "bytes", "ops", "loop", "why", "where", right=(3, 4))
    table.columns[-1].overflow = "fold"  # a line number is never truncated
    if any(len(shown_source(row["source"])) > 28 for row in rows[:MAX_ROWS]):
        table.columns[-2].max_width = 10
    for row in rows[:MAX_ROWS]:
        loop = "" if not row["in_loop"] else "in loop" if row["trip_count"] is None else f"x {row['trip_count']}"
        if row.get("every", 1) > 1:
            loop = f"every {row['every']} steps"
        elif "until" in row:
            loop = f"{loop} to step {row['until']}".strip()
        sent, axes = _bytes_of(row["bytes"], row["bytes_at_least"]), " x ".join(row["axes"])
        where = row["cause"], shown_source(row["source"])
        table.add_row(f"{row['op']} {row['dtype']}", axes, row["link"], sent, str(row["count"]), loop, *where)
    out.print(table)
    if len(rows) > MAX_ROWS:
        rest = sum(row["bytes_at_least"] for row in rows[MAX_ROWS:])
        out.print(f"[dim]and {len(rows) - MAX_ROWS} more, {format_bytes(rest)}; --json and --html have all[/]")
    totals = ", ".join(
        f"{axes} {'unknown' if num is None else format_bytes(num)}" for axes, num in document["wire"]["by_axes"].items()
    )
    out.print(f"[dim]by axis: {totals}[/]")
    if least := document["wire"].get("least"):
        formulas = ", ".join(f"{axes} {format_bytes(num)}" for axes, num in least.items())
        out.print(f"[dim]data parallelism by its formulas: {formulas}[/]")


def _bytes_of(num: int | None, at_least: int) -> str:
    return f"unknown, at least {format_bytes(at_least)}" if num is None else format_bytes(num)


def _show_time(document: Mapping[str, Any], out: Console) -> None:
    time = document["time"]
    out.print()
    if time is None:
        out.print("[bold]Time[/]  not known: there is no program")
        return
    step_s = document["predicted_step_s"]
    unit = "tokens" if time["tokens_per_s"] else "examples"
    speed = f"{format_count(time[f'{unit}_per_s'])} {unit}/s"
    rates = f"rates of {time['calibrated']}" if time["calibrated"] else "chip table"
    out.print(
        f"[bold]Time[/]  a step takes about [bold]{format_seconds(step_s)}[/], {speed}, MFU {time['mfu']:.1%}, "
        f"bound by {time['bound']} ({rates})"
    )
    if time["error_bar"]:
        out.print(f"[dim]{error_bar_text(time['error_bar'])}[/]")
    out.print(_shares(time["parts"], step_s, format_seconds))
    hidden = sum(link["busy_s"] - link["exposed_s"] for link in time["links"].values())
    if hidden > 1e-9:
        out.print(f"[dim]{format_seconds(hidden)} of the links' time overlaps with instructions[/]")
    if time["loops_of_unknown_length"]:
        out.print(f"[dim]{time['loops_of_unknown_length']} loops of unknown length were taken to run once[/]")


def _show_lines(document: Mapping[str, Any], out: Console) -> None:
    """Prints the lines of the program that take most of the step."""
    rows = document.get("lines", [])
    if not rows:
        return
    out.print("[bold]Time by line[/]  instructions, and the wait for the line's collectives")
    table = new_table("line", "time", "wait", "share", "MFU", "", right=(1, 2, 3, 4))
    table.columns[0].overflow = "fold"
    longest = max(len(shown_source(row["source"])) for row in rows[:MAX_LINES])
    room = max(0, out.width - longest - 44)
    for row in rows[:MAX_LINES]:
        table.add_row(*line_cells(row, document), f"[dim]{escape(row['text'][:room])}[/]")
    out.print(table)
    if len(rows) > MAX_LINES:
        rest = sum(row["seconds"] + row["exposed_s"] for row in rows[MAX_LINES:])
        out.print(f"[dim]and {len(rows) - MAX_LINES} more, {format_seconds(rest)}; --json and --html have all[/]")


def _show_findings(document: Mapping[str, Any], out: Console) -> None:
    out.print()
    if not document["findings"]:
        out.print("[bold]Findings[/]  none")
        return
    out.print("[bold]Findings[/]")
    for finding in document["findings"]:
        where = f" [dim]{shown_source(finding['source'])}[/]" if finding["source"] else ""
        out.print(f"  [{_COLOURS[finding['severity']]}]{finding['severity']}[/] {escape(finding['code'])}{where}")
        out.print(f"    {escape(finding['message'])}")
        out.print(f"    [dim]{escape(finding['fix'])}[/]")


def show_candidates(rows: Sequence[Mapping[str, Any]], to: Console | None = None, most: int = 10) -> None:
    """Prints the candidates of a search, each with its reason: refused ones, then the others, best first."""
    out = to or console()
    colours = {"best": "bold green", "fits": "green", "does not fit": "red", "not compiled": "dim"}
    refused, others = ([row for row in rows if (row["status"] == "refused") == is_first] for is_first in (True, False))
    out.print()
    if refused:
        out.print(f"[bold]Refused[/]  {len(refused)} of {len(rows)} candidates")
        table = new_table("", "why")
        for row in refused[:most]:
            table.add_row(row["name"], escape(row["reason"]))
        out.print(table)
        for reason, num in Counter(NUMBER.sub("N", row["reason"]) for row in refused[most:]).most_common():
            out.print(f"[dim]and {num} more: {escape(reason)}[/]")
        out.print()
    out.print(f"[bold]Candidates[/]  {len(others)}, best first")
    table = new_table("", "step", "memory", "", "why", right=(1, 2))
    for row in others[:most]:
        predicted, estimated = row["predicted_step_s"], row["estimated_step_s"]
        step = format_seconds(predicted) if predicted else f"~ {format_seconds(estimated)}" if estimated else ""
        memory = format_bytes(row["peak_bytes"]) if row["peak_bytes"] else ""
        status = f"[{colours[row['status']]}]{'equal' if row.get('equal') else row['status']}[/]"
        table.add_row(row["name"], step, memory, status, escape(row["reason"]))
    out.print(table)
    for status, num in Counter(row["status"] for row in others[most:]).most_common():
        out.print(f"[dim]and {num} more: {status}; --json has all[/]")


def _shares(parts: Mapping[str, float], whole: float, form: Callable[[float], str]) -> Table:
    """Returns a table of parts, the largest first: name, amount, share, bar."""
    table = new_table("", "", "", "", right=(1, 2))
    for name, part in sorted(parts.items(), key=lambda item: -item[1]):
        share = part / max(whole, 1e-9)
        bar = f"[blue]{'█' * max(1, round(share * 30))}[/]" if share > 0 else ""
        table.add_row(name, form(part), format_share(share), bar)
    return table
