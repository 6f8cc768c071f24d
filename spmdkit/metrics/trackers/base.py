"""What a tracker is: where the records of a run go in addition to the terminal. One file each in this folder, found by
its name.

A file holds `open(run, last_step, **options) -> Tracker`, as a user-defined function under `@sk.tracker` does. `run`
has `directory` and `config`, `last_step` is the restored step, or 0. The keyword arguments are the options of the
config; others are rejected.

Going back: a reader sees each step once, as it was trained last. After a restart `open` drops or marks what an earlier
process wrote after `last_step`; after a rollback within a process `rewind` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("scalars", "text", "image", "histogram", "hparams", "table")
"""What can be written. A run writes scalars, and a hook what it likes (`run.write`)."""

Record = Mapping[str, Any]
"""`{"step", ...}` of host values, with `"split": "eval"` for an evaluation: of scalars numbers by their names, of a
histogram nested lists of numbers (`sk.bincount`)."""


def nothing(*_: Any) -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Tracker:
    """Takes records, one after the other, in one thread of process 0. An exception is logged once, and it is not called
    again.

    Attributes:
        write: `(kind, record)`, with a kind of `accepts`.
        accepts: kinds of records.
        flush: returns when all of it is safe.
        rewind: `(step)`: drops what is newer, or marks it where the service cannot; after training went back to an
            earlier step (0: to the beginning). It comes before all that is written afterwards, also where records were
            dropped for their number. A place in which a step's later value takes the earlier one's needs none.
        close: writes out what is left.
        own: the run's own record: the training writes it directly, and an exception ends the run.
    """

    write: Callable[[str, Record], None]
    accepts: frozenset[str] = frozenset({"scalars"})
    flush: Callable[[], None] = nothing
    rewind: Callable[[int], None] = nothing
    close: Callable[[], None] = nothing
    own: bool = False

    def __post_init__(self) -> None:
        assert set(self.accepts) <= set(KINDS), f"a tracker accepts {sorted(self.accepts)}, out of {KINDS}"
