"""Results of benchmarks as files, and the tables of the documentation that are generated from them.

    python benchmarks/results.py        updates the tables in docs/

`save` writes one JSON file per benchmark to benchmarks/results/. A page shows a file as a table between two comments:

    <!-- results: NAME -->
    <!-- end of results -->
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results"
PACKAGES = ("jax", "jaxlib", "numpy")
PLACE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
NUMBER = re.compile(r"[-+]?[\d,.]*( \(.*\))?|yes|no")
RESAMPLES = 10_000


def save(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    command: str,
    *,
    note: str = "",
    versions: Mapping[str, str] | None = None,
    folder: Path = FOLDER,
) -> Path:
    """Writes benchmarks/results/NAME.json and returns its path.

    Args:
        name: name of the benchmark, one word.
        rows: rows of its table; the keys are the headings. A value is text, a number or `interval(...)`.
        command: the command that repeats the measurement.
        note: one sentence that the table needs, for example the unit or the state of the machine.
        versions: package -> version of packages that are measured in another environment.
    """
    installed = {package: metadata.version(package) for package in PACKAGES}
    result = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "versions": {"python": platform.python_version(), **installed, **(versions or {})},
        "note": note,
        "rows": [dict(row) for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def machine() -> str:
    """Returns the processor, the number of cores that this process can use, and the operating system."""
    models = re.findall(r"^model name\s*:\s*(.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    model = models[0] if models else platform.processor() or platform.machine()
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {platform.system()}"


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """Returns the median of the ratios of paired rounds and its 95 % bootstrap interval, the same for the same
    ratios."""
    values = np.asarray(ratios, float)
    draws = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return {"median": statistics.median(ratios), "low": float(low), "high": float(high), "rounds": len(values)}


def is_met(ratio: Mapping[str, float], goal: float) -> bool:
    """Returns whether an `interval` is at most the goal, or contains it."""
    return ratio["low"] <= goal


def table(name: str, folder: Path = FOLDER) -> str:
    """Returns the saved rows as a table in Markdown, below its command, date, machine and versions. Measurements that
    no script saves have no load and versions; without a command, each row states its own."""
    result = json.loads((folder / f"{name}.json").read_text())
    rows = result["rows"]
    heads = list(dict.fromkeys(head for row in rows for head in row))
    is_number = {head: all(NUMBER.fullmatch(_cell(row.get(head))) for row in rows) for head in heads}
    lines = [
        _row(heads),
        _row("---:" if is_number[head] else "---" for head in heads),
        *(_row(_cell(row.get(head)) for head in heads) for row in rows),
    ]
    if source := _source(result):
        lines = [textwrap.fill(source, 120, break_on_hyphens=False, break_long_words=False), "", *lines]
    return "\n".join(lines) + "\n"


def _source(result: Mapping[str, Any]) -> str:
    """Returns the command, the date, the machine, the versions and the note of a result."""
    command = f"`{result['command']}`" if "command" in result else ""
    source = ", ".join(filter(None, (command, result.get("date"), result.get("machine"))))
    if "load" not in result:
        return f"{source}." if source else ""
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    return f"{source}, load {result['load'][0]}; {versions}. {result['note']}".strip()


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return f"{value['median']:.3f} ({value['low']:.3f} to {value['high']:.3f})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def updated(page: str, folder: Path = FOLDER) -> str:
    """Returns the text of a page with its tables generated from the saved results; a table is empty before its first
    measurement."""
    generated = lambda name: table(name, folder) if (folder / f"{name}.json").exists() else ""
    return PLACE.sub(lambda found: found[1] + generated(found[2]) + found[3], page)


def main() -> None:
    """Updates the tables of all pages."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        before = path.read_text()
        if (after := updated(before)) != before:
            path.write_text(after)
            print(f"updated {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
