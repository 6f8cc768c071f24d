"""Milliseconds of the row analysis within the trace of a step: `python benchmarks/row_analysis.py CONFIG...`."""

from __future__ import annotations

import collections
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
SPENT: collections.Counter[str] = collections.Counter()


def measure(owner: Any, name: str, label: str) -> None:
    """Adds the seconds of each call of a function to `SPENT[label]`."""
    function = getattr(owner, name)

    def measured(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            SPENT[label] += time.perf_counter() - start

    setattr(owner, name, measured)


if __name__ == "__main__":
    for walk in WALKS:
        measure(analysis, walk, "walks")
    measure(analysis, "_traced", "traces")
    measure(TaskStep, "trace", "trace of the step")
    for path in sys.argv[1:]:
        for _ in range(3):
            jax.clear_caches()
            SPENT.clear()
            _ = sk.build(load_config(path)).traced
            print(path, *(f"{label}: {1000 * seconds:.0f} ms" for label, seconds in SPENT.items()))
