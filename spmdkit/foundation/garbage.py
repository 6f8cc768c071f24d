"""When Python's collector of reference cycles runs.

At its defaults it takes a tenth of the start of a command, since imports and traces allocate a million objects and
leave few cycles, and half a second at exit, where the interpreter walks all of them several times (CPython 3.11,
2026-11-28). A training loop keeps the defaults: a cycle of a user's hook may hold arrays of the devices.
"""

from __future__ import annotations

import gc

RARELY = (50_000, 10, 10)
_before: list[tuple[int, int, int]] = []


def collect_rarely() -> None:
    """Makes collections rare until training begins (`collect_as_before`), or until the exit."""
    _before.append(gc.get_threshold())
    gc.set_threshold(*RARELY)


def collect_as_before() -> None:
    """Undoes `collect_rarely`, if it was called."""
    if _before:
        gc.set_threshold(*_before.pop())


def never_collect() -> None:
    """Leaves everything that exists to the exit of the process, which then collects nothing."""
    gc.freeze()
