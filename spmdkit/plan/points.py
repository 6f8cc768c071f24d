"""Several plans of a config as rows: of several targets, or of several values of one key (sweep.py). A row of `--json`:

name, target, status, reason      status: `fits`, `over budget`, `does not fit`, `refused` (it has no plan)
num_devices, mesh, batch_size, predicted_step_s, tokens_per_s, examples_per_s, mfu, bound, collective_bytes
peak_bytes, limit_bytes           of one device
cost                              see prices.py
notes                             limits of the plan's accuracy
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape

from spmdkit.foundation.formatting import format_bytes, format_count, format_duration, format_seconds, new_table
from spmdkit.plan.document import Document
from spmdkit.plan.planner import PlanProcesses, call_all, log, num_workers
from spmdkit.plan.prices import Pricing, cost_of
from spmdkit.plan.table import NUMBER, console

Row = dict[str, Any]
STATUSES = ("fits", "over budget", "does not fit", "refused")
_COLOURS = {"fits": "green", "over budget": "red", "does not fit": "red", "refused": "dim"}


@dataclass(frozen=True)
class Point:
    """A plan to compute.

    Attributes:
        name: shown in its row.
        target: None: the devices of the config.
        changes: dotted keys of the config -> values.
        more: further fields of its row.
    """

    name: str
    target: str | None
    changes: Mapping[str, Any]
    more: Mapping[str, Any]


def plan_points(points: Sequence[Point], processes: PlanProcesses, pricing: Pricing) -> list[Row]:
    """Returns the row of each point, planned in separate processes. A point without a plan does not stop the others."""
    rows = dict[int, Row]()

    def plan(number: int, point: Point) -> None:
        rows[number] = row_of(point, processes(point.changes, point.target), pricing)
        log(summary(rows[number]))

    call_all([partial(plan, *numbered) for numbered in enumerate(points)], num_workers())
    return [rows[number] for number in range(len(points))]


def row_of(point: Point, result: Document | str, pricing: Pricing) -> Row:
    """Returns the row of a point from its plan, or from the reason why there is none."""
    row = {"name": point.name, "target": point.target, "changes": dict(point.changes), **point.more}
    if isinstance(result, str):
        return row | {"status": "refused", "reason": result, "fits": None}
    memory, time = result["memory"], result["time"] or {}
    over = "; ".join(result["budget"]["exceeded"])
    needs = f"{format_bytes(memory['peak_bytes'])} of {format_bytes(memory['limit_bytes'])} a device"
    status = "does not fit" if not result["fits"] else "over budget" if over else "fits"
    return row | {
        "target": result["target"],
        "status": status,
        "reason": over if status == "over budget" else f"a step needs {needs}",
        **{key: result[key] for key in ("fits", "num_devices", "mesh", "batch_size", "predicted_step_s")},
        **{key: time.get(key) for key in ("tokens_per_s", "examples_per_s", "mfu", "bound")},
        "collective_bytes": result["collective_bytes"],
        "peak_bytes": memory["peak_bytes"],
        "limit_bytes": memory["limit_bytes"],
        "cost": cost_of(result, pricing),
        "notes": result["notes"],
    }


def summary(row: Row) -> str:
    """Returns a line of progress."""
    step = f", {format_seconds(row['predicted_step_s'])} a step" if row.get("predicted_step_s") else ""
    return f"{row['name']}: {row['status']}{step if row['status'] == 'fits' else ''}"


def fastest_first(rows: Sequence[Row]) -> list[Row]:
    """Returns rows by status, then by predicted step time."""
    return sorted(rows, key=lambda row: (STATUSES.index(row["status"]), row.get("predicted_step_s") or 0.0))


def cells(row: Row) -> list[str]:
    """Returns what a table shows of a row, below `HEAD`."""
    cost, money = row.get("cost") or {}, partial(_money, (row.get("cost") or {}).get("currency"))
    known: Callable[[Any, Callable[[Any], str]], str] = lambda value, form: "" if value is None else form(value)
    tokens_per_s = row.get("tokens_per_s")
    memory = f"{format_bytes(row['peak_bytes'])}" if "peak_bytes" in row else ""
    return [
        {"fits": "yes", "does not fit": "no"}.get(row["status"], str(row["status"])),
        known(row.get("predicted_step_s"), format_seconds),
        known(None if tokens_per_s else row.get("examples_per_s"), format_count),
        known(tokens_per_s, format_count),
        known(row.get("mfu"), lambda x: f"{x:.1%}"),
        memory,
        known(cost.get("per_step"), money),
        known(cost.get("per_billion_tokens"), money),
        known(cost.get("hours"), lambda x: format_duration(3600 * x)),
        known(cost.get("total"), money),
        known(row.get("efficiency"), lambda x: f"{x:.0%}"),
    ]


HEAD = (
    *("fits", "step time", "examples/s", "tokens/s", "MFU", "memory"),
    *("per step", "1B tokens", "time", "total", "efficiency"),
)


def _money(currency: str | None, value: float) -> str:
    digits = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"${digits}" if currency == "USD" else f"{digits} {currency}"


def table_of(first: str, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Returns the head of a table and its cells, without columns that have no value. `first`: of the names."""
    shown: list[list[str]] = [[row["name"], *cells(row)] for row in rows]
    used = [n for n in range(len(HEAD) + 1) if n < 2 or any(line[n] for line in shown)]
    return [[first, *HEAD][n] for n in used], [[line[n] for n in used] for line in shown]


def show_rows(first: str, rows: Sequence[Row], pricing: Pricing, to: Console | None = None) -> None:
    """Prints the rows, the reasons of those that do not fit, and the notes."""
    out = to or console()
    head, lines = table_of(first, rows)
    table = new_table(*head, right=range(2, len(head)))
    for number, column in enumerate(table.columns):
        column.no_wrap, column.overflow = number > 0, "fold"
    for row, (name, fits, *others) in zip(rows, lines, strict=True):
        table.add_row(escape(name), f"[{_COLOURS[row['status']]}]{fits}[/]", *others)
    out.print(table)
    for text in reasons(rows):
        out.print(escape(text))
    for text in notes_of(rows, pricing):
        out.print(f"[dim]{escape(text)}[/]")


def reasons(rows: Sequence[Row]) -> list[str]:
    """Returns why rows do not fit: the first row with a reason, and the names of the others with the same reason, apart
    from numbers."""
    alike = dict[tuple[str, str], list[Row]]()
    for row in rows:
        if row["status"] != "fits":
            alike.setdefault((row["status"], NUMBER.sub("N", row["reason"])), []).append(row)
    lines = list[str]()
    for first, *others in alike.values():
        status = f"{'is ' * (first['status'] != 'does not fit')}{first['status']}: {first['reason']}"
        lines.append(f"{first['name']} {status}")
        if others:
            lines.append(f"The same holds for {', '.join(row['name'] for row in others)}.")
    return lines


def notes_of(rows: Sequence[Row], pricing: Pricing) -> list[str]:
    """Returns what a reader of the rows has to know: the prices, the length of the run, limits of the accuracy."""
    costs = [row["cost"] for row in rows if row.get("cost")]
    notes = list[str]()
    priced = [cost for cost in costs if cost["per_hour"] is not None]
    if priced:
        notes.append(f"list prices of {priced[0]['date']}, without discounts; --prices FILE replaces them")
    if priced and len(priced) < len(costs):
        names = ", ".join(row["name"] for row in rows if row.get("cost") and row["cost"]["per_hour"] is None)
        notes.append(f"no price is known for {names}")
    if pricing.tokens:
        has_tokens = any(row.get("tokens_per_s") for row in rows)
        length = f"time and total are those of {format_count(pricing.tokens)} tokens"
        notes.append(length if has_tokens or not costs else "--tokens has no effect: the batch has no tokens")
    for note in dict.fromkeys(note for row in rows for note in row.get("notes", ())):
        names = ", ".join(row["name"] for row in rows if note in row.get("notes", ()))
        notes.append(f"note: {names if len(rows) > 1 else ''}: {note}")
    return notes
