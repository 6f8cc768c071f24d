"""`exceeded`: compares a plan with the `budget` of the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdkit.config import Budget
from spmdkit.foundation.formatting import format_bytes


def exceeded(budget: Budget | None, document: Mapping[str, Any]) -> list[str]:
    """Returns one sentence for each limit that a plan exceeds; an empty list without a budget."""
    if budget is None:
        return []
    problems = []
    sent, at_least = document["collective_bytes"], document["collective_bytes_at_least"]
    if (most := budget.collective_bytes) is not None:
        if at_least > most:
            problems.append(f"budget.collective_bytes is {_bytes(most)}, a device sends {_bytes(at_least)} a step")
        elif sent is None and document["fits"]:
            problems.append(
                f"budget.collective_bytes is {_bytes(most)}, and a loop of unknown length holds a collective: the "
                "bytes are unknown"
            )
    peak = document["memory"]["peak_bytes"]
    if (most := budget.peak_memory) is not None and peak > most:
        problems.append(f"budget.peak_memory is {_bytes(most)}, a device needs {_bytes(peak)}")
    in_loops = document["collectives_in_loops"]
    if (most := budget.collectives_in_loop) is not None and in_loops > most:
        problems.append(f"budget.collectives_in_loop is {most}, the program has {in_loops} inside loops")
    if budget.findings == "none" and document["findings"]:
        codes = [f["code"] for f in document["findings"]]
        problems.append(f"budget.findings is none, the plan has {len(codes)}: {', '.join(dict.fromkeys(codes))}")
    return problems


def _bytes(num: int) -> str:
    return f"{num} bytes ({format_bytes(num)})" if num >= 1024 else f"{num} bytes"
