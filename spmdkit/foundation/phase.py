"""The phase of training in this process: phase, step, start time. The training thread sets it with `at`, `during` or
`waiting`; the watchdog and the messages of a hang read it.

There is one per process, as there is one stack, so that a watchdog in another thread can read it without a reference.
Only the thread that called `begin` sets it: a reader, a saver, a second training in a notebook's thread change nothing.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple


class Phase(NamedTuple):
    """The current activity of the training thread.

    Attributes:
        phase: `import`, `compile`, `restore`, `data`, `step`, `evaluation`, `save`, `hook NAME`, or `waiting` (for
            other processes, which publish their own phases).
        detail: what the process waits for.
        step: the step that is trained, 0 before the first.
        since: monotonic seconds.
        number: of changes, to detect one.
    """

    phase: str
    detail: str
    step: int
    since: float
    number: int


WAITING = "waiting"
EVALUATION, READING = "evaluation", "reading data"
"""The phase, with its detail if this process alone is in it; otherwise all compute a batch together."""

_phase = Phase("begin", "", 0, time.monotonic(), 0)
_owner: int | None = None
seconds_by_phase: dict[str, float] = defaultdict(float)
"""Phase -> seconds in it so far, of completed phases."""


_ends_since = float("-inf")


def begin() -> None:
    """Makes the calling thread the training thread."""
    global _owner, _phase, _ends_since
    _ends_since = float("-inf")
    _owner = threading.get_ident()
    _phase = Phase("begin", "", 0, time.monotonic(), _phase.number + 1)
    seconds_by_phase.clear()


def end() -> None:
    """Ends the training thread: later changes have no effect."""
    global _owner
    _owner = None


def mark_ending() -> None:
    """Records that this process exits for a reason that it shares with others: their exit need not end it."""
    global _ends_since
    _ends_since = time.monotonic()


def is_ending(within_s: float) -> bool:
    """Returns whether this was recorded in the last `within_s` seconds."""
    return time.monotonic() - _ends_since < within_s


def current_phase() -> Phase:
    """Returns the current phase."""
    return _phase


def enter(phase: str, step: int | None = None, detail: str = "") -> None:
    """Sets the phase of this thread. Costs 0.4 us."""
    global _phase
    if threading.get_ident() != _owner:
        return
    before, now = _phase, time.monotonic()
    seconds_by_phase[before.phase] += now - before.since
    _phase = Phase(phase, detail, before.step if step is None else step, now, before.number + 1)


@contextmanager
def during(phase: str, detail: str = "") -> Iterator[None]:
    """Context of a phase; afterwards the previous phase starts again."""
    before = _phase
    enter(phase, detail=detail)
    try:
        yield
    finally:
        enter(before.phase, detail=before.detail)


def waiting(what: str) -> AbstractContextManager[None]:
    """Context in which this process waits for other processes, at `what`."""
    return during(WAITING, what)
