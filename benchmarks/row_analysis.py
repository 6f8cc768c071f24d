"""Processor milliseconds of the row analysis within the trace of a step, median of five:
`python benchmarks/row_analysis.py CONFIG...`."""

from __future__ import annotations

import collections
import statistics
import sys
import time
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import spmdkit as sk
from spmdkit.config import load_config
from spmdkit.program.task_step import TaskStep
from spmdkit.step.dataflow import analysis

WALKS = ("flows_of", "key_uses", "needs_scale", "check_constants", "dependence")
RUNS = 5
SPENT: collections.Counter[str] = collections.Counter()


def measure(owner: Any, name: str, label: str) -> None:
    """Adds the seconds of each call of a function to `SPENT[label]`."""
    function = getattr(owner, name)

    def measured(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            SPENT[label] += time.process_time() - start

    setattr(owner, name, measured)


if __name__ == "__main__":
    for walk in WALKS:
        measure(analysis, walk, "walks")
    measure(analysis, "_traced", "traces")
    measure(TaskStep, "trace", "trace of the step")
    for path in sys.argv[1:]:
        runs = []
        for _ in range(RUNS):
            jax.clear_caches()
            SPENT.clear()
            _ = sk.build(load_config(path)).traced
            runs.append({**SPENT, "share of walks": SPENT["walks"] / SPENT["trace of the step"]})
        median = {label: statistics.median(run[label] for run in runs) for label in runs[0]}
        share = median.pop("share of walks")
        print(path, *(f"{label}: {1000 * s:.0f} ms" for label, s in median.items()), f"walks: {100 * share:.1f} %")
