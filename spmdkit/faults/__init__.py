"""What happens when a run is asked to stop, or cannot go on: signals, and the one way out for every exception."""

from spmdkit.faults.exceptions import run_process
from spmdkit.faults.signals import StopSignals

__all__ = ["StopSignals", "run_process"]
