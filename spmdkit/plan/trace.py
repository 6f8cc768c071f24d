"""The timeline of a plan as a file for Perfetto (ui.perfetto.dev) or chrome://tracing.

One row for the instructions, one for each link. Times are microseconds from the start of the iteration.

Source: Google, "Trace Event Format": complete events (`X`) and metadata events (`M`) in a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.foundation import files

CATEGORIES = {"run": "instruction", "loop": "loop", "wait": "exposed", "transfer": "transfer"}
_COLORS = {"exposed": "terrible"}


def write_trace(document: Mapping[str, Any], path: Path) -> None:
    """Writes the timeline of a plan.

    Raises:
        ConfigError: the plan has no timeline, or the file cannot be written.
    """
    if not document.get("timeline"):
        raise ConfigError(f"--timeline {path}: the plan has no program, so it has no timeline. Leave it out.")
    files.write_requested("--timeline", path, json.dumps(trace(document)))


def trace(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object of a trace file."""
    timeline = document["timeline"]
    threads = {row: number for number, row in enumerate(timeline["rows"])}
    name = f"{document['target']}: {timeline['title']}"
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": name}}]
    for row, tid in threads.items():
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": row}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": tid, "args": {"sort_index": tid}})
    for span in timeline["spans"]:
        category = CATEGORIES[span["kind"]]
        event = {
            "ph": "X",
            "name": span["name"],
            "cat": category,
            "pid": 0,
            "tid": threads[span["row"]],
            "ts": span["start_s"] * 1e6,
            "dur": (span["end_s"] - span["start_s"]) * 1e6,
            "args": {"source": span["source"] or ""},
        }
        events.append(event | ({"cname": _COLORS[category]} if category in _COLORS else {}))
    return {"traceEvents": events, "displayTimeUnit": "ns"}
