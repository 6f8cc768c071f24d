"""The phase of training in this process: phase, step, start time. The training thread sets it with `at`, `during` or
`waiting`. The watchdog and the messages of a hang read it.

The phase is global to the process, so that a watchdog in another thread can read it without a reference. Only the
thread that called `begin` can set it, not a reader, a saver or a second training in a notebook.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple


class Phase(NamedTuple):
    """The current activity of the training thread.

    Attributes:
        phase: `import`, `compile`, `restore`, `data`, `step`, `evaluation`, `save`, `hook NAME`, or `waiting` (for
            other processes, which publish their phases).
        detail: what the process waits for.
        step: the current step, 0 before the first.
        since: monotonic seconds.
        number: the number of changes, to detect a change.
    """

    phase: str
    detail: str
    step: int
    since: float
    number: int


WAITING = "waiting"
EVALUATION, READING = "evaluation", "reading data"
"""The phase, and its detail while this process reads alone. Otherwise all processes compute a batch together."""

_phase = Phase("begin", "", 0, time.monotonic(), 0)
_owner: int | None = None
seconds_by_phase: dict[str, float] = defaultdict(float)
"""Phase -> total seconds of its completed occurrences."""
on_change: Callable[[Phase], None] | None = None
"""Called with each new phase, in the training thread; None: nothing."""


_ends_since = float("-inf")
_hook = ("", 0, "")


def begin() -> None:
    """Makes the calling thread the training thread."""
    global _owner, _phase, _ends_since, _hook
    _ends_since, _hook = float("-inf"), ("", 0, "")
    _owner = threading.get_ident()
    _phase = Phase("begin", "", 0, time.monotonic(), _phase.number + 1)
    seconds_by_phase.clear()
    if on_change is not None:
        on_change(_phase)


def end() -> None:
    """Releases the training thread. Later changes have no effect."""
    global _owner
    _owner = None


def mark_ending() -> None:
    """Records that this process exits for a reason shared with other processes, so their exit is not an error."""
    global _ends_since
    _ends_since = time.monotonic()


def is_ending(within_s: float) -> bool:
    """Returns whether `mark_ending` was called in the last `within_s` seconds."""
    return time.monotonic() - _ends_since < within_s


def current_phase() -> Phase:
    """Returns the current phase."""
    return _phase


def enter(phase: str, step: int | None = None, detail: str = "") -> None:
    """Sets the phase of this thread. Takes 0.4 us."""
    global _phase
    if threading.get_ident() != _owner:
        return
    before, now = _phase, time.monotonic()
    seconds_by_phase[before.phase] += now - before.since
    _phase = Phase(phase, detail, before.step if step is None else step, now, before.number + 1)
    if on_change is not None:
        on_change(_phase)


@contextmanager
def during(phase: str, detail: str = "") -> Iterator[None]:
    """Context manager of a phase. Restores the previous phase on exit."""
    before = _phase
    enter(phase, detail=detail)
    try:
        yield
    finally:
        enter(before.phase, detail=before.detail)


@contextmanager
def in_hook(name: str) -> Iterator[None]:
    """Context manager of a call of a user-defined hook."""
    global _hook
    settle_hook()
    _hook = name, _hook[1], ""
    try:
        with during(f"hook '{name}'"):
            yield
    finally:
        _hook = "", _hook[1], ""


def pass_hook() -> None:
    """Counts a call of a user-defined hook that this process has completed, or that runs on process 0 only."""
    global _hook
    settle_hook()
    _hook = "", _hook[1] + 1, ""


def hold_hook(name: str, action: str) -> None:
    """Counts the call of a user-defined hook as passed only after its action, which all processes perform together:
    until `settle_hook`, or the next call of a hook."""
    global _hook
    settle_hook()
    _hook = name, _hook[1], action


def settle_hook() -> None:
    """Counts the call that `hold_hook` has held back, if there is one."""
    global _hook
    if _hook[2]:
        _hook = "", _hook[1] + 1, ""


def current_hook() -> tuple[str, int, str]:
    """Returns (the user-defined hook in which this process is or "", the number of calls that it has passed, the action
    that the hook has requested or "")."""
    return _hook


def waiting(what: str) -> AbstractContextManager[None]:
    """Context manager for a wait for other processes, at `what`."""
    return during(WAITING, what)
