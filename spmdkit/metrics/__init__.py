"""What a run tells about itself: numbers (`metrics.jsonl`, TensorBoard), a face on the terminal, events, a report.

A sink takes records of host numbers, one after the other, and never touches a device. The caller fetches the numbers,
so nothing here waits for an accelerator. Only process 0 has sinks; every process may append to the event log.
Nothing optional and nothing slow (rich, tensorboardX) is imported before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from spmdkit.metrics.environment import environment
from spmdkit.metrics.events import EventLog
from spmdkit.metrics.jsonl import JsonlSink, read_lines
from spmdkit.metrics.progress import ProgressFace
from spmdkit.metrics.report import write_report
from spmdkit.metrics.tensorboard import TensorboardSink
from spmdkit.metrics.throughput import Throughput

__all__ = [
    "EventLog",
    "JsonlSink",
    "ProgressFace",
    "Sink",
    "TensorboardSink",
    "Throughput",
    "environment",
    "read_lines",
    "write_report",
]


class Sink(Protocol):
    """Takes one record at a time: `{"step", "loss", ...}`, with `"split": "eval"` for an evaluation."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Takes a record of host numbers."""

    def close(self) -> None:
        """Writes out what is left. May be called twice."""
