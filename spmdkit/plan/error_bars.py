"""The error of predicted step times: how far they are from step times that others have published.

The runs are those of `benchmarks/published.yaml`; `benchmarks/published.py` computes the figures, and a test compares
them. A bar holds for plans by the TPU or GPU compiler with rates of the chip table. There is none for CPU devices, also
where they are the substitute of a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmdkit.plan.machine.target import Target


@dataclass(frozen=True)
class ErrorBar:
    """Eight of ten published runs are within `relative` of the predicted step time, of `runs` in all."""

    relative: float
    runs: int


ERROR_BARS: Mapping[str, ErrorBar] = {"tpu": ErrorBar(0.10, 22), "gpu": ErrorBar(0.10, 9)}
"""Kind of chip -> error bar."""


def error_bar(target: Target) -> ErrorBar | None:
    """Returns the error bar of a plan for a target, or None."""
    return None if target.calibrated else ERROR_BARS.get(target.compiler)


def error_bar_text(bar: Mapping[str, Any]) -> str:
    """Returns the sentence of a plan, from the bar in its JSON."""
    return f"error bar ±{bar['relative']:.0%}: it covers 80 % of the step times of {bar['runs']} published runs"
