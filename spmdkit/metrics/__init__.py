"""Logging of a run: metrics (`metrics.jsonl`, TensorBoard), progress on the terminal, events.

A tracker receives records of host numbers sequentially and never accesses a device: the caller fetches the numbers.
Only process 0 has trackers; every process may append to the event log. Optional and slow modules (rich, tensorboardX)
are imported on first use.
"""

from __future__ import annotations

from spmdkit.metrics.environment import environment as environment
from spmdkit.metrics.events import EventLog as EventLog
from spmdkit.metrics.jsonl import read_lines as read_lines
from spmdkit.metrics.progress import Progress as Progress
from spmdkit.metrics.throughput import Goodput as Goodput
from spmdkit.metrics.throughput import Throughput as Throughput
from spmdkit.metrics.trackers import Tracker as Tracker
from spmdkit.metrics.trackers import Trackers as Trackers
from spmdkit.metrics.trackers.jsonl import JsonlTracker as JsonlTracker
from spmdkit.metrics.trackers.tensorboard import TensorboardTracker as TensorboardTracker
