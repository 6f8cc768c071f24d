"""The roles of the processes of a run: part of the events `started` and `restored`, and of the guide.

tf.train.Supervisor and MonitoredTrainingSession make one process the chief: it initialises or restores, saves and
writes summaries, and the others wait until the model is ready. Here every process runs the same program, so few roles
belong to one process.
"""

from __future__ import annotations

ALL = "all"

ROLES = {
    "initialises": ALL,  # each its own shards, from the same seed; agreed on before the first step
    "restores": ALL,  # each reads its own shards
    "saves": ALL,  # each writes its own shards
    "commits": 0,  # the record, the commit by rename, and retention
    "decides": 0,  # what depends on a clock or a file: checkpoint.every_seconds, stopping
    "summaries": 0,  # metrics.jsonl, counts.jsonl, trackers, the report
    "evaluates": ALL,
}
"""Task -> `all`, or the process that does it."""
