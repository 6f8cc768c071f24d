"""The interface of trackers: destinations of the records of a run, in addition to the terminal. One file per tracker in
this folder, selected by its name.

A file defines `open(run, last_step, **options) -> Tracker`, like a user-defined function under `@sk.tracker`. `run` has
`directory` and `config`. `last_step` is the restored step, or 0. The keyword arguments are the options of the config;
unknown options are rejected.

Rewind: a reader sees each step once, with the values trained last. After a restart, `open` drops or marks the records
that an earlier process wrote after `last_step`. After a rollback within a process, `rewind` does so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("scalars", "array", "text", "image", "histogram", "audio")
"""Kinds of records. A run writes scalars and arrays; a hook may write any kind (`run.write`)."""

Record = Mapping[str, Any]
"""`{"step", name: value}` of host values, with `"split": "eval"` for an evaluation:

    scalars    a number
    array      nested lists of numbers: metrics such as `sk.bincount`
    text       a str
    image      an array [height, width] or [height, width, channels], uint8 or floats from 0 to 1
    histogram  an array of values; their distribution is shown
    audio      an array [samples] or [samples, channels] of floats from -1 to 1, and `"rate"`, the samples per second
"""


def names_of(record: Record, kind: str) -> list[str]:
    """Returns the names of the values of a record."""
    others = ("step", "split", "rate") if kind == "audio" else ("step", "split")
    return [name for name in record if name not in others]


def nothing(*_: Any) -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Tracker:
    """Receives records sequentially in one thread of process 0. After an exception, which is logged, it is disabled.

    Attributes:
        write: `(kind, record)`, with a kind of `accepts`.
        accepts: kinds of records.
        flush: returns when all records are stored durably.
        rewind: `(step)`: after training returned to an earlier step (0: the start), drops newer records, or marks them
            if the service cannot drop them. It is called before any later record is written, also if records were
            dropped because the queue was full. Not needed if a later value of a step replaces the earlier one.
        close: writes the remaining records.
        own: the run's primary record: the training thread writes it, and an exception ends the run.
        close_s: seconds that the end of a run waits for `close`; None: 10.
    """

    write: Callable[[str, Record], None]
    accepts: frozenset[str] = frozenset({"scalars"})
    flush: Callable[[], None] = nothing
    rewind: Callable[[int], None] = nothing
    close: Callable[[], None] = nothing
    own: bool = False
    close_s: float | None = None

    def __post_init__(self) -> None:
        assert set(self.accepts) <= set(KINDS), f"a tracker accepts {sorted(self.accepts)}, out of {KINDS}"
