"""Human-readable text: losses, rates, durations, sizes and counts in one format, and suggestions for misspelled
names."""

from __future__ import annotations

import difflib
import io
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table


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
    """Returns a rate without insignificant digits: `12345`, `98.7`, `0.034`."""
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
    """Returns a time with three digits and its unit: `850 us`, `23.1 ms`, `2.42 s`, `1234 s`."""
    if seconds >= 999.5:
        return f"{seconds:.0f} s"
    return "0 s" if seconds == 0 else _three_digits(seconds, ((1.0, " s"), (1e-3, " ms"), (1e-6, " us")))


def format_count(value: float) -> str:
    """Returns a number with three digits: `8.03B`, `12.4k`, `950`."""
    return _three_digits(value, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, "")))


def _three_digits(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Returns a value in the largest of its units (sorted in descending order) in which it is formatted as at least
    one."""
    size, unit = next((u for u in units if value >= 0.9995 * u[0]), units[-1])
    return f"{value / size:.3g}{unit}"


def format_share(share: float) -> str:
    """Returns a part of a whole: `42%`, `<1%` of a part that is not 0."""
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def format_error(error: float) -> str:
    """Returns a relative error: `8e-07`, `0.17`, `4`, `0`."""
    return f"{error:.0e}" if 0 < error < 1e-3 else f"{error:.2g}"


def counted(num: int, one: str, several: str = "") -> str:
    """Returns a number with its noun: `1 device`, `8 devices`, `2 processes`. `several`: an irregular plural."""
    return f"{num} {one if num == 1 else several or one + ('es' if one.endswith('s') else 's')}"


def format_bytes(num_bytes: float) -> str:
    """Returns a size: `512 B`, `1.5 KiB`, `12.6 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def new_table(*columns: str, right: Collection[int] = ()) -> Table:
    """Returns an empty table, as every command prints it. Columns with an index in `right` are right-aligned."""
    from rich.table import Table  # 40 ms

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=any(columns), header_style="dim")
    for number, name in enumerate(columns):
        align: Literal["left", "right"] = "right" if number in right else "left"
        table.add_column(name, justify=align, no_wrap=name in ("collective", "bytes", "ops"))
    return table


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Returns the lines of a table without a head, of any width and without colors."""
    from rich.console import Console

    table = new_table(*[""] * len(rows[0]), right=right)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=2**20, markup=False, highlight=False, emoji=False).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def shown_source(source: str | None) -> str:
    """Returns `file.py:12` relative to the working directory or to the library's folder; empty for None."""
    path, colon, line = (source or "").rpartition(":")
    if not colon:
        return line
    path = re.split(r"/(?:site|dist)-packages/", path)[-1]
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return f"{relative if not relative.startswith('../..') else os.path.basename(path)}:{line}"


_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal interprets instead of displaying: control characters except newline and tab, direction
marks, surrogates."""


def visible(text: str) -> str:
    """Returns a text that a terminal displays unchanged: interpreted characters are escaped, for example `\\x1b`. For
    names of files, leaves and metrics."""
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def all_visible(value: Any) -> Any:
    """Returns plain values with `visible` applied to every string in them, including keys."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {all_visible(key): all_visible(inner) for key, inner in value.items()}
    return [all_visible(inner) for inner in value] if isinstance(value, list | tuple) else value


MAX_LINES, MAX_COLUMNS = 24, 1000


def bounded(text: str) -> str:
    """Returns a message that fits on a screen. Long messages and long lines are shortened in the middle."""
    lines = [_truncate(line) for line in text.splitlines()]
    if len(lines) > MAX_LINES:
        num_hidden = len(lines) - MAX_LINES + 1
        lines = [*lines[: MAX_LINES - 9], f"... {num_hidden} lines ...", *lines[-8:]]
    return "\n".join(lines)


def _truncate(line: str) -> str:
    return line if len(line) <= MAX_COLUMNS else f"{line[:560]} ... {len(line) - 960} characters ... {line[-400:]}"


def nearest(word: str, options: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` for the closest of `options`, or an empty string if none is close."""
    match = difflib.get_close_matches(word, list(options), n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ""


_names: dict[str, str] = {}


def name_axes(roles: Mapping[str, str]) -> None:
    """Sets the names of mesh axes in the output of this process: name -> axis, the config's `roles`."""
    _names.clear()
    _names.update({axis: name for name, axis in roles.items()})


def shown(axis: str) -> str:
    """Returns the name of a mesh axis in output."""
    return _names.get(axis, axis)


def shown_axes(axes: Iterable[str]) -> str:
    """Returns `data x fsdp`."""
    return " x ".join(map(shown, axes))
