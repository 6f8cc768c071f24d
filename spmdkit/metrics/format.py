"""Numbers as people read them: losses, rates, durations. One form for the terminal and the report."""

from __future__ import annotations

import math


def format_value(value: float) -> str:
    """Returns a metric in at most ten characters: `2.3411`, `0.0009`, `1.235e-05`, `128`, `nan`."""
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if isinstance(value, int) and size < 1e7:
        return str(value)
    if size != 0 and (size < 5e-4 or size >= 1e5):
        return f"{value:.3e}"
    return f"{value:.4f}" if size < 1000 else f"{value:.1f}"


def format_rate(per_s: float) -> str:
    """Returns a rate without needless digits: `12345`, `98.7`, `0.034`."""
    if not math.isfinite(per_s):
        return str(float(per_s))
    if per_s >= 100:
        return f"{per_s:.0f}" if per_s < 1e8 else f"{per_s:.2e}"
    return f"{per_s:.1f}" if per_s >= 1 or per_s == 0 else f"{per_s:.2g}"


def format_duration(seconds: float) -> str:
    """Returns a duration in its two largest units: `45s`, `1m20s`, `2h05m`, `3d04h`."""
    if not math.isfinite(seconds):
        return "?"
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    minutes = round(total / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(total / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def format_seconds(seconds: float) -> str:
    """Returns a short time with its unit: `850 us`, `12.3 ms`, `3.2 s`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
