"""Where training stands, in words: one line of at most 100 columns, for the terminal with a bar and without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spmdkit.metrics.jsonl import FIRST_KEYS, LAST_KEYS, plain_number
from spmdkit.words import format_rate, format_value

MAX_COLUMNS = 100


@dataclass(frozen=True)
class Status:
    """Where training stands, in words ready to print. Empty where unknown."""

    step: int
    total_steps: int
    loss: str = ""
    metrics: tuple[str, ...] = ()
    rate: str = ""
    left: str = ""
    wait: str = ""

    @property
    def place(self) -> str:
        """`step  120/2000`, of the same width at every step."""
        total = str(self.total_steps)
        return f"step {self.step:>{len(total)}}/{total}"

    def words(self, columns: int = MAX_COLUMNS, place: bool = True) -> str:
        """Returns `step  120/2000  loss 2.3411  <other metrics>  12345 examples/s  left 1m20s  input wait 2%`; other metrics go first."""
        return fit(
            [self.place * place, self.loss, *self.metrics, self.rate, self.left, self.wait], columns, len(self.metrics)
        )


def status_of(record: Mapping[str, Any], total_steps: int, unit: str, left: str) -> Status:
    """Returns the status that a training record tells."""
    step_time_s, wait_s, rate = (record.get(name) for name in ("step_time_s", "input_wait_s", "examples_per_s"))
    return Status(
        step=int(record["step"]),
        total_steps=total_steps,
        loss=_loss(record),
        metrics=tuple(_others(record)),
        rate=f"{format_rate(rate)} {unit}/s" if rate is not None else "",
        left=left,
        wait=f"input wait {min(wait_s / step_time_s, 1):.0%}" if wait_s is not None and step_time_s else "",
    )


def evaluation_line(record: Mapping[str, Any], total_steps: int) -> str:
    """Returns the line of a record with `split`, its numbers below those of the training lines."""
    place = f"step {record['step']:>{len(str(total_steps))}} {record['split']}"
    return fit([place.ljust(len(Status(0, total_steps).place)), _loss(record), *_others(record)])


def fit(pieces: list[str], columns: int = MAX_COLUMNS, optional: int = 0) -> str:
    """Returns the pieces that are not empty, two spaces apart, in at most `columns`.

    The `optional` ones from the third piece on go first, from the last one; then whatever is too much at the end.
    """
    parts = dict(enumerate(pieces))
    for index in (*reversed(range(2, 2 + optional)), *reversed(range(1, len(pieces)))):
        if len(_joined(parts)) <= columns:
            break
        parts.pop(index, None)
    return _joined(parts)[:columns]


def _joined(parts: Mapping[int, str]) -> str:
    return "  ".join(text for text in parts.values() if text)


def _loss(record: Mapping[str, Any]) -> str:
    return f"loss {format_value(plain_number('loss', record['loss']))}" if "loss" in record else ""


def _others(record: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(set(record) - set(FIRST_KEYS) - set(LAST_KEYS)):
        yield f"{name} {format_value(plain_number(name, record[name]))}"
