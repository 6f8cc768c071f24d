"""The part of a run's report that compares its plan (`plan.json`) with what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from spmdkit.foundation.formatting import format_bytes, format_seconds
from spmdkit.metrics.report.page import fact_table, section


def plan_section(plan: Mapping[str, Any], step_times_s: Sequence[float]) -> str:
    """Returns the section, or nothing for a file that is no plan."""
    peak, limit = (_number(plan, "memory", name) for name in ("peak_bytes", "limit_bytes"))
    if peak is None or limit is None:
        return ""
    sent, predicted = _number(plan, "collective_bytes"), _number(plan, "predicted_step_s")
    time = plan.get("time")
    bound = time.get("bound") if isinstance(time, Mapping) else None
    calibrated = time.get("calibrated") if isinstance(time, Mapping) else None
    facts = [
        ("memory of a device", f"{format_bytes(peak)} of {format_bytes(limit)}"),
        ("sent by a device in a step", "unknown" if sent is None else format_bytes(sent)),
        ("step, predicted", "not known" if predicted is None else format_seconds(predicted)),
        ("step, measured (median)", format_seconds(statistics.median(step_times_s)) if step_times_s else ""),
        ("bound by", bound),
        ("rates", f"measured on {calibrated}" if calibrated else "of the chip table"),
    ]
    findings = plan.get("findings")
    rows = "".join(
        f"<p><b>{escape(str(f.get('code')))}</b> {escape(str(f.get('message')))} <span "
        f"class='none'>{escape(str(f.get('source') or ''))}"
        "</span></p>"
        for f in (findings[:20] if isinstance(findings, list) else ())
        if isinstance(f, Mapping)
    )
    return section("Plan", fact_table(facts) + rows)


def _number(plan: Mapping[str, Any], *path: str) -> float | None:
    value: Any = plan
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
