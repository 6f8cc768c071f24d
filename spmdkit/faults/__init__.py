"""Stops and failures of a run: signals, the exit path of every exception, and the watchdog."""

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
