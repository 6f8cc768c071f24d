"""Stops and failures of a run: signals, the exit path of every exception, and the watchdog."""

from spmdkit.faults.exit_handler import (
    describe,
    exit_process,
    exit_with_message,
    lost_peer,
    report_and_exit,
    run_process,
    taken_over,
)
from spmdkit.faults.signals import ExitRequested, StopSignals
from spmdkit.faults.watchdog import Watchdog, run_watchdog

__all__ = [
    "ExitRequested",
    "StopSignals",
    "Watchdog",
    "describe",
    "exit_process",
    "exit_with_message",
    "lost_peer",
    "report_and_exit",
    "run_process",
    "run_watchdog",
    "taken_over",
]
