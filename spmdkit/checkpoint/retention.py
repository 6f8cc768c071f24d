"""Deletes checkpoints: by the retention rules of the config, by name, and the remains of unfinished saves.

A kill during a deletion leaves no partial step.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from spmdkit.checkpoint import location, quarantine
from spmdkit.checkpoint import record as records
from spmdkit.checkpoint.location import Location
from spmdkit.checkpoint.object_store import Remote
from spmdkit.checkpoint.record import TEMPORARY_MARK
from spmdkit.errors import CheckpointError, CheckpointWriteError, UnreachableError
from spmdkit.foundation import files
from spmdkit.foundation.constants import is_step_name


class RetentionRules(Protocol):
    """The part of `config.retention.Retention` that `Checkpoints` uses."""

    @property
    def best_metric(self) -> tuple[str, str] | None: ...

    def steps_to_keep(self, steps: Sequence[int], scores: Mapping[int, float | None]) -> Collection[int]: ...


def delete_old(directory: Location, just_written: int, retention: RetentionRules) -> None:
    """Deletes the steps that the rules do not retain. A step that is being read is retained until the next save.

    Raises:
        CheckpointWriteError: a step cannot be deleted.
    """
    steps, best = records.committed_steps(directory), retention.best_metric
    scores = {step: _score(directory, step, best[0]) for step in steps} if best is not None else {}
    retained = {*retention.steps_to_keep(steps, scores), just_written}
    for old in (step for step in steps if step not in retained):
        try:
            delete_step(directory, old)
        except OSError as error:
            raise CheckpointWriteError(
                f"step {just_written} is saved, but the old step {old} could not be deleted from {directory} "
                f"({records.first_line(error)}). Retention keeps {', '.join(map(str, sorted(retained)))}. Delete it by "
                "hand."
            ) from error


def _score(directory: Location, step: int, metric: str) -> float | None:
    try:
        return records.read_record(directory, step).metrics.get(metric)
    except UnreachableError:
        raise  # it may be the best
    except CheckpointError:
        return None  # a damaged checkpoint is never the best


def delete_step(directory: Location, step: int, even_if_held: bool = False) -> bool:
    """Deletes a committed step unless a reader holds it (`listing.hold_step`); returns whether it was deleted.

    The step is renamed first (in a bucket its marker is deleted first), so a kill during the deletion leaves no step.
    """
    if isinstance(directory, Remote):
        location.remove(directory / str(step))
        return True
    doomed = directory / f"{step}.deleted{TEMPORARY_MARK}"
    shutil.rmtree(doomed, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        try:
            record = stack.enter_context(files.open_regular(directory / str(step) / records.RECORD_FILE))
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not even_if_held:
                return False
        except OSError:
            pass  # no record, or a file system without flock
        os.rename(directory / str(step), doomed)
    shutil.rmtree(doomed)
    return True


def remove(directory: Location, steps: Sequence[int]) -> None:
    """Deletes the named steps, all or none, and never the last valid step.

    Raises:
        CheckpointError: a name is not a committed step, or no valid step would remain.
        CheckpointWriteError: a step cannot be deleted.
    """
    have = records.committed_steps(directory)
    if unknown := sorted(set(steps) - set(have)):
        raise CheckpointError(
            f"checkpoint rm: {directory} has no step {unknown[0]}. A checkpoint is named by its step. The steps "
            f"are {', '.join(map(str, have)) or 'none'}. Name one of them."
        )
    remaining, _ = quarantine.newest_valid(directory, None, set(steps))
    good, _ = quarantine.newest_valid(directory, None, ())
    if remaining is None and good is not None:
        raise CheckpointError(
            f"checkpoint rm: step {good} is the last valid checkpoint in {directory}. It is never deleted: without it "
            "the run's work is lost. To delete it, delete the run directory by hand."
        )
    for step in steps:
        try:
            if not delete_step(directory, step):
                raise BlockingIOError("another process reads it")
        except OSError as error:
            raise CheckpointWriteError(
                f"checkpoint rm: step {step} could not be deleted from {directory} ({records.first_line(error)}). "
                "The folder must be writable. Delete it by hand."
            ) from error


def remove_unfinished(directory: Location) -> list[str]:
    """Deletes partially written and partially deleted steps of a killed run; returns the names. Only the owner of the
    directory may call this."""
    if isinstance(directory, Remote):
        steps = filter(is_step_name, location.names(directory))
        return [name for name in steps if remove_uncommitted(directory / name)]
    with os.scandir(directory) as entries:
        names = sorted(e.name for e in entries if TEMPORARY_MARK in e.name and e.is_dir(follow_symlinks=False))
    for name in names:
        shutil.rmtree(directory / name)
    return names


def remove_uncommitted(folder: Remote) -> bool:
    """Deletes the files of an unfinished save from a bucket; returns False, and deletes nothing, if the folder contains
    other files. Only the owner of the directory may call this."""
    if not set(folder.names()) <= {records.RECORD_FILE, records.STATE_FOLDER, "_CHECKPOINT_METADATA"}:
        return False
    location.remove(folder)
    return True
