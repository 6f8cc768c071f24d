"""The root cause among several dead processes: one failure ends the others, in an arbitrary order. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from spmdkit.errors import OUTCOMES, ExitCode, outcome

ABORTED = 128 + signal.SIGABRT


@dataclass(frozen=True)
class Exit:
    """How one process ended. `status` is negative for a signal, as in `subprocess`; `order`: detection order."""

    process: int
    status: int
    order: int
    ended_by_us: bool = False  # still alive when the launcher sent TERM or KILL because of another process
    message: str | None = None  # from its error file
    time: float = 0.0  # from its error file, comparable on one machine only
    blamed: tuple[int, ...] = ()  # from its error file: the processes at fault, if not this one
    assigned_code: int | None = None  # the exit code assigned by the launcher, if the process could not report one

    @property
    def code(self) -> int:
        """The exit code as a shell reports it: 128+n for signal n."""
        if self.assigned_code is not None:
            return self.assigned_code
        return 128 - self.status if self.status < 0 else self.status


def describe_status(exit: Exit) -> str:
    """Returns `ended by SIGKILL`, or the description of an exit code."""
    if exit.status >= 0 or exit.assigned_code is not None:
        return outcome(exit.code)
    number = -exit.status
    return f"ended by {signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'}"


def describe_exit_code(code: int) -> str:
    """Returns `exit code 76, a watchdog ended a hang`; only the number if the code is not one of spmdkit's."""
    known = code in {int(known) for known, _ in OUTCOMES.values()}
    return f"exit code {code}" + (f", {outcome(code)}" if known else "")


def cause(exits: list[Exit]) -> Exit | None:
    """Returns the process that failed first, or None when all returned 0.

    Strongest evidence first: it wrote its own error; it died by a signal other than 6 (JAX aborts by 6 when a *peer*
    dies); it returned another code; it stopped on request; it reported a lost peer; it lost the coordination service,
    without a peer to name; it aborted; the launcher ended it.
    """
    failed = [e for e in exits if e.code != 0]
    return min(failed, key=_weakness) if failed else None


def lost(exits: list[Exit]) -> frozenset[int]:
    """Returns the processes lost as in a machine failure: killed by an external signal, blocked, or reported missing by
    others. Excludes processes that reported why they exited."""
    killed = {
        e.process
        for e in exits
        if e.assigned_code is not None or (e.status < 0 and not e.ended_by_us and e.code != ABORTED)
    }
    missed = {process for e in exits if e.code == ExitCode.PEER_LOST for process in e.blamed}
    reported = {e.process for e in exits if e.status > 0 and e.assigned_code is None}
    return frozenset(killed | (missed - reported))


def _weakness(e: Exit) -> tuple[int, bool, float, int]:
    if e.assigned_code is not None:
        rank = 0
    elif e.ended_by_us:
        rank = 7
    elif e.code == ExitCode.PREEMPTED:
        rank = 3
    elif e.message is not None:
        rank = 0 if e.code != ExitCode.PEER_LOST else 4 if e.blamed else 5
    elif e.code == ABORTED:
        rank = 6
    else:
        rank = 1 if e.status < 0 else 2
    return rank, bool(e.blamed) and e.process not in e.blamed, e.time, e.order
