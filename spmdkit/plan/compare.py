"""`compare`: the differences between two plans in communication, memory and step time."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import all_visible, format_bytes, format_count, format_seconds, new_table
from spmdkit.mesh.mesh import describe_mesh
from spmdkit.plan.table import console

Document = Mapping[str, Any]


def read_plan(path: Path) -> dict[str, Any]:
    """Returns a plan from its JSON file.

    Raises:
        ConfigError: the file is not a plan.
    """
    try:
        plan = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read as a plan ({type(error).__name__}). A plan is JSON, as spmdkit plan CONFIG --json "
            "prints it and as train writes it into its run directory (plan.json)."
        ) from error
    if not isinstance(plan, dict) or not {"target", "memory", "collectives", "layout"} <= plan.keys():
        raise ConfigError(
            f"{path} is JSON but not a plan: target, memory, collectives or layout is missing. Give a plan.json."
        )
    return plan


@contextlib.contextmanager
def as_written(*paths: Path) -> Iterator[None]:
    """Runs code that prints the plans in these files. Raises ConfigError if a file does not have the structure that
    `spmdkit plan` writes."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        if not paths:
            raise
        named = " or ".join(map(str, paths))
        raise ConfigError(
            f"{named} has the keys of a plan, but invalid values ({type(error).__name__}: "
            f"{str(error)[:120]}). A plan must be unchanged since spmdkit wrote it. Write it again: "
            "spmdkit plan CONFIG --json."
        ) from error


def compare(a: Document, b: Document) -> dict[str, Any]:
    """Returns the differences from plan `a` to plan `b`: `{name: [before, after]}` in groups; equal values are
    omitted."""
    before, after = _groups(a), _groups(b)
    codes = [{f"{f['code']} {f['source'] or ''}".strip() for f in plan["findings"]} for plan in (a, b)]
    return {
        **{name: _changed(before[name], after[name]) for name in before},
        "step_s": [a["predicted_step_s"], b["predicted_step_s"]],
        "peak_bytes": [a["memory"]["peak_bytes"], b["memory"]["peak_bytes"]],
        "collective_bytes": [a["collective_bytes"], b["collective_bytes"]],
        "findings": [sorted(codes[0] - codes[1]), sorted(codes[1] - codes[0])],
    }


def _changed(a: dict[str, Any], b: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [a.get(name), b.get(name)] for name in a | b if a.get(name) != b.get(name)}


def _groups(plan: Document) -> dict[str, dict[str, Any]]:
    facts = ("target", "num_devices", "form", "batch_size", "microbatches", "fits", "num_params", "flops")
    wire = Counter[str]()  # by op and cause, independent of source lines
    for row in plan["collectives"]:
        if row["counted"]:
            place = "in loop" if row["in_loop"] else "once"
            phase = "" if row.get("phase", "step") == "step" else f", {row['phase']}"
            name = f"{row['op']} {row['dtype']} over {' x '.join(row['axes'])}, {row['cause']}, {place}{phase}"
            wire[name] += row["bytes_at_least"]
    leaf: Callable[[Any], str] = lambda row: f"{row['dtype']}{row['shape']} cut {row['spec']} in {row['memory_kind']}"
    return {
        "what": {name: plan[name] for name in facts} | {"mesh": describe_mesh(plan["mesh"])},
        "time": plan["time"]["parts"] if plan["time"] else {},
        "memory": plan["memory"]["parts"],
        "collectives": dict(wire),
        "layout": {row["path"]: leaf(row) for row in plan["layout"]},
    }


def show_comparison(a: Document, b: Document, names: tuple[str, str]) -> None:
    """Prints the differences from `a` to `b`."""
    out, changed, names = console(), all_visible(compare(a, b)), all_visible(names)
    out.print(f"[bold]{escape(names[0])}[/] -> [bold]{escape(names[1])}[/]")
    for name, (before, after) in changed["what"].items():
        values = (format_count(value) if isinstance(value, float) else str(value) for value in (before, after))
        out.print(f"  {name}: {escape(' -> '.join(values))}")
    _numbers(out, "Memory of a device", changed["peak_bytes"], changed["memory"], format_bytes)
    _numbers(out, "Wire, bytes of a device and step", changed["collective_bytes"], changed["collectives"], format_bytes)
    _numbers(out, "Time of a step", changed["step_s"], changed["time"], format_seconds)
    for title, codes in zip(("gone", "new"), changed["findings"], strict=True):
        for code in codes:
            out.print(f"finding {title}: {escape(code)}")
    if leaves := changed["layout"]:
        out.print(f"\n[bold]Layout[/]  {len(leaves)} leaves live elsewhere")
        for path, (before, after) in list(leaves.items())[:8]:
            out.print(f"  {escape(path)}: {escape(str(before))} -> {escape(str(after))}")


def _numbers(
    out: Console, title: str, total: list[Any], parts: Mapping[str, list[Any]], unit: Callable[[float], str]
) -> None:
    before, after = total
    ratio = f"  (x {after / before:.2f})" if before and after is not None else ""
    shown = ["unknown" if value is None else unit(value) for value in total]
    out.print(f"\n[bold]{title}[/]  {' -> '.join(shown)}{ratio}")
    table = new_table("", "", "", "", right=(1, 2, 3))
    moved = {name: (after or 0) - (before or 0) for name, (before, after) in parts.items()}
    for name, by in sorted(moved.items(), key=lambda item: -abs(item[1])):
        before, after = parts[name]
        table.add_row(name, unit(before or 0), unit(after or 0), f"{'+' if by > 0 else '-'}{unit(abs(by))}")
    if parts:
        out.print(table)
