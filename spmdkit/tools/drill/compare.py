"""Compares a run with faults and one without: the state of the last step bitwise, and every logged metric."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spmdkit.checkpoint import read_state
from spmdkit.foundation.constants import MEASURED
from spmdkit.metrics import read_lines
from spmdkit.tools.drill.corrupt import newest


def different_leaf(clean: Path, disturbed: Path) -> str:
    """Returns the difference between the last states of two runs; empty if they are bitwise equal."""
    steps = [newest(run / "checkpoints") for run in (clean, disturbed)]
    if steps[0] != steps[1]:
        return f"the last step is {steps[1]}, without faults {steps[0]}"
    theirs, ours = (read_state(run / "checkpoints", steps[0]) for run in (clean, disturbed))
    if theirs.keys() != ours.keys():
        return f"different leaves: {', '.join(sorted(theirs.keys() ^ ours.keys())[:3])}"
    for path, leaf in theirs.items():
        other = ours[path]
        if (leaf.shape, leaf.dtype) != (other.shape, other.dtype):
            return f"{path} is {other.dtype}{list(other.shape)}, without faults {leaf.dtype}{list(leaf.shape)}"
        if leaf.tobytes() != other.tobytes():
            return f"{path} differs by {_distance(leaf, other):.2g} of its norm"
    return ""


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    return float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(a)), 1e-30)


def different_record(clean: Path, disturbed: Path) -> str:
    """Returns the first line of metrics.jsonl that differs; empty if none does. Measured times are ignored."""
    theirs, ours = (_records(run) for run in (clean, disturbed))
    for a, b in zip(theirs, ours, strict=False):
        if a != b:
            keys = sorted(key for key in {*a, *b} if a.get(key) != b.get(key))
            return f"step {b.get('step')}: {', '.join(f'{k} is {b.get(k)}, not {a.get(k)}' for k in keys[:3])}"
    return "" if len(theirs) == len(ours) else f"{len(ours)} records, without faults {len(theirs)}"


def _records(run: Path) -> list[dict[str, str]]:
    return [{k: repr(v) for k, v in line.items() if k not in MEASURED} for line in read_lines(run / "metrics.jsonl")]
