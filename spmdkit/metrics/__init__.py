"""What a run tells about itself: numbers (`metrics.jsonl`, TensorBoard), progress on the terminal, events.

A sink takes records of host numbers, one after the other, and never touches a device. The caller fetches the numbers,
so nothing here waits for an accelerator. Only process 0 has sinks; every process may append to the event log.
Nothing optional and nothing slow (rich, tensorboardX) is imported before it is used.
"""

from __future__ import annotations

from spmdkit.metrics.environment import environment
from spmdkit.metrics.events import EventLog
from spmdkit.metrics.jsonl import read_lines
from spmdkit.metrics.progress import Progress
from spmdkit.metrics.sinks import Sink, Sinks
from spmdkit.metrics.sinks.jsonl import JsonlSink
from spmdkit.metrics.sinks.tensorboard import TensorboardSink
from spmdkit.metrics.throughput import Throughput

__all__ = [
    "EventLog",
    "JsonlSink",
    "Progress",
    "Sink",
    "Sinks",
    "TensorboardSink",
    "Throughput",
    "environment",
    "read_lines",
]
