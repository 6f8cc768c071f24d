"""`skipped_batches.json`: the batches that a run skips permanently. Needed because a rollback saves no checkpoint.

Skipped batches: `data.skip_batches` of the config, the record of the restored checkpoint, and this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdkit import data
from spmdkit.cluster import Cluster
from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.foundation import files
from spmdkit.program.program import Program

NAME = "skipped_batches.json"

Ranges = tuple[tuple[int, int], ...]


def write(directory: Path, cluster: Cluster, skipped: Ranges) -> None:
    """Writes the skipped batches (first, last) on process 0. They are on disk when this returns."""
    if cluster.is_main:
        files.write_json(directory / NAME, {"skipped_batches": [list(pair) for pair in skipped]})


def read(directory: Path) -> Ranges:
    """Returns the batches that `write` stored; () if there is no such file. Raises ConfigError if it cannot be read."""
    try:
        return tuple((int(a), int(b)) for a, b in json.loads(files.read_regular(directory / NAME))["skipped_batches"])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"{directory / NAME} cannot be read ({type(error).__name__}: {error}). It lists the batches that this run "
            "skips permanently; without it the examples would differ. Restore it, or delete it if no batch was "
            "skipped."
        ) from None


def read_for_all(directory: Path, cluster: Cluster) -> Ranges:
    """Returns the result of `read` on process 0, on every process: without a shared disk, directories differ between
    hosts. Raises like `read`."""
    return tuple((a, b) for a, b in cluster.from_main("skipped batches", lambda: read(directory)))


def take(program: Program, on_disk: Ranges, step: int, record: Mapping[str, Any]) -> None:
    """Removes from a program's schedule the batches skipped when `step` was saved and those to skip after it.

    Args:
        on_disk: the result of `read_for_all`.

    Raises:
        ConfigError: the config names a batch that the run has already trained on.
    """
    saved = saved_in(record)
    last = as_saved(program.schedule, record).number(step)
    skipped = {n for a, b in saved for n in range(a, min(b, last) + 1)}
    requested = data.merge_ranges(program.config.data.skipped_ranges())
    late = next((n for a, b in requested for n in range(a, min(b, last) + 1) if n not in skipped), None)
    if late is not None:
        raise ConfigError(
            f"data.skip_batches names batch {late}, and step {step} of this run was saved after training on it. Only "
            f"later batches can be skipped. Name batches from {last + 1} on, or set run_dir to a new folder."
        )
    program.skip_batches(data.merge_ranges([*saved, *((max(a, last + 1), b) for a, b in on_disk if b > last)]))


def add(program: Program, step: int, before: Ranges, count: int, numbers: Sequence[int]) -> list[int]:
    """Removes `count` batches after `step` and the batches with these numbers from a program's schedule; returns all
    their numbers.

    Args:
        before: the batches skipped before the rollback; they stay skipped.
    """
    program.skip_batches([*before, *program.schedule.skipped])
    more = [*(n for n, _ in program.schedule.numbers(step + 1, count)), *numbers]
    program.skip_batches([*program.schedule.skipped, *((n, n) for n in more)])
    return more


def as_saved(schedule: data.BatchSchedule, record: Mapping[str, Any]) -> data.BatchSchedule:
    """Returns the schedule at the time when a checkpoint was saved."""
    return schedule.with_skipped(saved_in(record))


def saved_in(record: Mapping[str, Any]) -> Ranges:
    """Returns the skipped batches in the record of a checkpoint."""
    return data.merge_ranges((int(first), int(last)) for first, last in record.get("skipped_batches", []))


def skipped_rows_record(config: Config, cluster: Cluster, program: Program) -> list[list[int]]:
    """Returns [batch, row] of the rows skipped by any process, on process 0: a restarted run skips the same rows. All
    processes call it at each save."""
    mine = program.skipped_rows[0].positions()
    if not config.data.max_bad_examples or cluster.num_processes == 1:
        return mine
    return sorted(place for places in cluster.gather("skipped rows", mine) for place in places)
