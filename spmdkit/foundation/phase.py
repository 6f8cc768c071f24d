"""Where training stands in this process: phase, step, since when. Whoever watches reads it; whoever works says `at`,
`during` or `waiting`.

There is one, as there is one stack: a watcher in another thread, and the messages of a hang, look at it without being
handed anything.
Only the thread that called `begin` is listened to: a reader, a saver, a second training in a notebook's thread change
nothing.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple


class Phase(NamedTuple):
    """What the training thread is doing.

    Attributes:
        phase: `import`, `compile`, `restore`, `data`, `step`, `evaluation`, `save`, `hook NAME`, or `waiting` (for
            other processes, who say themselves where they stand).
        detail: what is waited for.
        step: the step that is trained, 0 before the first.
        since: monotonic seconds.
        number: of changes, so that one can be seen.
    """

    phase: str
    detail: str
    step: int
    since: float
    number: int


WAITING = "waiting"
EVALUATION, READING = "evaluation", "reading data"
"""The phase, and its detail while this process is on its own in it; otherwise all compute a batch together."""

_phase = Phase("begin", "", 0, time.monotonic(), 0)
_owner: int | None = None
seconds_by_phase: dict[str, float] = defaultdict(float)
"""Phase -> seconds in it so far, of those that are left."""


_ends_since = float("-inf")


def begin() -> None:
    """From now on the calling thread is the one that trains."""
    global _owner, _phase, _ends_since
    _ends_since = float("-inf")
    _owner = threading.get_ident()
    _phase = Phase("begin", "", 0, time.monotonic(), _phase.number + 1)
    seconds_by_phase.clear()


def end() -> None:
    """Nobody is listened to any more."""
    global _owner
    _owner = None


def mark_ending() -> None:
    """Says that this process ends by itself, for a reason that it shares with others: that they have left need not end
    it."""
    global _ends_since
    _ends_since = time.monotonic()


def is_ending(within_s: float) -> bool:
    """Returns whether this process said so, no longer ago than `within_s`."""
    return time.monotonic() - _ends_since < within_s


def current_phase() -> Phase:
    """Returns where training stands."""
    return _phase


def enter(phase: str, step: int | None = None, detail: str = "") -> None:
    """Says that this thread is in another phase now. Costs 0.4 us."""
    global _phase
    if threading.get_ident() != _owner:
        return
    before, now = _phase, time.monotonic()
    seconds_by_phase[before.phase] += now - before.since
    _phase = Phase(phase, detail, before.step if step is None else step, now, before.number + 1)


@contextmanager
def during(phase: str, detail: str = "") -> Iterator[None]:
    """The body is this phase; after it, the one before goes on, as if it began then."""
    before = _phase
    enter(phase, detail=detail)
    try:
        yield
    finally:
        enter(before.phase, detail=before.detail)


def waiting(what: str) -> AbstractContextManager[None]:
    """The body waits for other processes, at `what`."""
    return during(WAITING, what)
