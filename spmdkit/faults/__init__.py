"""What happens when a run is requested to stop, cannot go on, or does not: signals, the one way out for every
exception, the watchdog."""

from spmdkit.faults.exit_handler import (
    describe,
    leave,
    leave_with,
    lost_peer,
    report_and_leave,
    run_process,
    taken_over,
)
from spmdkit.faults.signals import ExitRequested, StopSignals
from spmdkit.faults.watchdog import Watchdog, watching

__all__ = [
    "ExitRequested",
    "StopSignals",
    "Watchdog",
    "describe",
    "leave",
    "leave_with",
    "lost_peer",
    "report_and_leave",
    "run_process",
    "taken_over",
    "watching",
]
