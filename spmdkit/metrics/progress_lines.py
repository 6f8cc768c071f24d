"""The progress of training as text, for the terminal with and without a bar: lines of at most `log.columns`. What does
not fit continues in further lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spmdkit.foundation.formatting import format_bytes, format_rate, format_value
from spmdkit.metrics.jsonl import FIRST_KEYS, LAST_KEYS, plain_number

COLUMNS = 160
"""Columns of a log that is no terminal."""
SHORT_NAMES = {"learning_rate": "lr", "gradient_norm": "grad norm"}
"""Keys that a run adds to the metrics of a task -> their names in a line."""
INDENT = "    "


def step_position(step: int, total_steps: int) -> str:
    """Returns `step  120/2000`, with the same width at every step."""
    return f"step {step:>{len(str(total_steps))}}/{total_steps}"


def training_line(record: Mapping[str, Any], unit: str, left: str, start: str = "", columns: int = COLUMNS) -> str:
    """Returns `<start>  loss 2.3411  <metrics>  epoch 1.25  lr 1.000e-03  grad norm 0.5213  12345 examples/s  ...`."""
    step_time_s, wait_s, rate = (record.get(name) for name in ("step_time_s", "input_wait_s", "examples_per_s"))
    tokens, mfu, memory, goodput = (
        record.get(name) for name in ("tokens_per_s", "mfu", "peak_memory_bytes", "goodput")
    )
    pieces = [
        start,
        _loss(record),
        *_others(record),
        f"epoch {format_value(record['epoch'])}" if "epoch" in record else "",
        *(f"{short} {format_value(record[name])}" for name, short in SHORT_NAMES.items() if name in record),
        f"{format_rate(rate)} {unit}/s" if rate is not None else "",
        f"{format_rate(tokens)} tokens/s" if tokens is not None else "",
        left,
        f"input wait {min(wait_s / step_time_s, 1):.0%}" if wait_s is not None and step_time_s else "",
        f"MFU {mfu:.1%}" if mfu is not None else "",
        f"memory {format_bytes(memory)}" if memory is not None else "",
        f"goodput {goodput:.0%}" if goodput is not None else "",
    ]
    return _wrapped(pieces, columns)


def evaluation_line(record: Mapping[str, Any], total_steps: int, columns: int = COLUMNS) -> str:
    """Returns the line of a record with `split`, its numbers aligned with those of the training lines."""
    start = f"step {record['step']:>{len(str(total_steps))}} {record['split']}"
    return _wrapped([start.ljust(len(step_position(0, total_steps))), _loss(record), *_others(record)], columns)


def _wrapped(pieces: list[str], columns: int) -> str:
    """Returns the non-empty pieces, two spaces apart, in lines of at most `columns`. A longer piece has a line."""
    lines = [""]
    for piece in filter(None, pieces):
        joined = f"{lines[-1]}  {piece}" if lines[-1].strip() else f"{lines[-1]}{piece}"
        if len(joined) <= columns or not lines[-1].strip():
            lines[-1] = joined
        else:
            lines.append(f"{INDENT}{piece}")
    return "\n".join(lines)


def _loss(record: Mapping[str, Any]) -> str:
    return f"loss {format_value(plain_number('loss', record['loss']))}" if "loss" in record else ""


def _others(record: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(set(record) - set(FIRST_KEYS) - set(LAST_KEYS) - set(SHORT_NAMES)):
        yield f"{name} {format_value(plain_number(name, record[name]))}"
