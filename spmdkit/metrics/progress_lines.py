"""The progress of training as text: lines of at most 100 columns, for the terminal with and without a bar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spmdkit.foundation.formatting import format_rate, format_value
from spmdkit.metrics.jsonl import FIRST_KEYS, LAST_KEYS, plain_number

MAX_COLUMNS = 100


def step_position(step: int, total_steps: int) -> str:
    """Returns `step  120/2000`, with the same width at every step."""
    return f"step {step:>{len(str(total_steps))}}/{total_steps}"


def training_line(record: Mapping[str, Any], unit: str, left: str, start: str = "", columns: int = MAX_COLUMNS) -> str:
    """Returns `<start>  loss 2.3411  epoch 1.25  <other metrics>  12345 examples/s  left 1m20s  input wait 2%`."""
    step_time_s, wait_s, rate = (record.get(name) for name in ("step_time_s", "input_wait_s", "examples_per_s"))
    speed = f"{format_rate(rate)} {unit}/s" if rate is not None else ""
    wait = f"input wait {min(wait_s / step_time_s, 1):.0%}" if wait_s is not None and step_time_s else ""
    epoch = [f"epoch {format_value(record['epoch'])}"] if "epoch" in record else []
    return _fit([start, _loss(record)], [*epoch, *_others(record)], [speed, left, wait], columns)


def evaluation_line(record: Mapping[str, Any], total_steps: int) -> str:
    """Returns the line of a record with `split`, its numbers aligned with those of the training lines."""
    start = f"step {record['step']:>{len(str(total_steps))}} {record['split']}"
    return _fit(
        [start.ljust(len(step_position(0, total_steps))), _loss(record)], list(_others(record)), [], MAX_COLUMNS
    )


def _fit(first: list[str], optional: list[str], last: list[str], columns: int) -> str:
    """Returns the non-empty pieces, two spaces apart, in at most `columns`; drops `optional` pieces from the end if
    needed."""
    while len(text := "  ".join(filter(None, (*first, *optional, *last)))) > columns and (optional or last):
        (optional or last).pop()
    return text[:columns]


def _loss(record: Mapping[str, Any]) -> str:
    return f"loss {format_value(plain_number('loss', record['loss']))}" if "loss" in record else ""


def _others(record: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(set(record) - set(FIRST_KEYS) - set(LAST_KEYS)):
        yield f"{name} {format_value(plain_number(name, record[name]))}"
