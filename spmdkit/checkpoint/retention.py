"""Which checkpoints stay: the last k, every n-th step, the best by a metric; and deleting so that a kill leaves no half
step."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Literal

from spmdkit.checkpoint import location, quarantine
from spmdkit.checkpoint import record as records
from spmdkit.checkpoint.location import Place
from spmdkit.checkpoint.object_store import Remote
from spmdkit.checkpoint.record import TEMPORARY_MARK
from spmdkit.errors import CheckpointError, CheckpointWriteError, Unreachable
from spmdkit.foundation.constants import is_step_name

Mode = Literal["min", "max"]


def steps_to_delete(
    steps: Sequence[int],
    just_written: int,
    keep: int,
    scores: Mapping[int, float | None],
    mode: Mode,
    keep_every: int | None = None,
) -> list[int]:
    """Returns the steps that go, ascending: all but the newest `keep`, each that `keep_every` divides, the best scored
    one and the one just written.

    A step without a score (or with one that is not finite, stored as None) is never the best; of equals the newest is.
    """
    ordered = sorted(steps)
    kept = {*ordered[-keep:], just_written}
    if keep_every is not None:
        kept.update(step for step in ordered if step % keep_every == 0)
    scored = [(score, step) for step in ordered if (score := scores.get(step)) is not None]
    if scored:
        sign = 1.0 if mode == "max" else -1.0
        kept.add(max(scored, key=lambda pair: (sign * pair[0], pair[1]))[1])
    return [step for step in ordered if step not in kept]


def delete_old(
    directory: Place, just_written: int, keep: int, keep_every: int | None, best: tuple[str, Mode] | None
) -> None:
    """Deletes the steps that are not kept; one that somebody reads stays until the next save.

    Raises:
        CheckpointWriteError: one cannot be deleted.
    """
    steps, mode = records.committed_steps(directory), best[1] if best is not None else "min"
    scores = {step: _score(directory, step, best[0]) for step in steps} if best is not None else {}
    for old in steps_to_delete(steps, just_written, keep, scores, mode, keep_every):
        try:
            delete_step(directory, old)
        except OSError as error:
            raise CheckpointWriteError(
                f"step {just_written} is saved, but the old step {old} could not be deleted from {directory} "
                f"({records.first_line(error)}). The last {keep} and the best are kept. Delete it by hand."
            ) from error


def _score(directory: Place, step: int, metric: str) -> float | None:
    try:
        return records.read_record(directory, step).metrics.get(metric)
    except Unreachable:
        raise  # it may be the best
    except CheckpointError:
        return None  # A damaged checkpoint is never the best; whoever restores it is told.


def delete_step(directory: Place, step: int, even_if_held: bool = False) -> bool:
    """Deletes a committed step, unless an `eval` or an export holds it (`listing.held`); returns whether it did.

    It is renamed first, in a bucket its marker removed first: a kill in between leaves a folder that is no step.
    """
    if isinstance(directory, Remote):
        location.remove(directory / str(step))
        return True
    doomed = directory / f"{step}.deleted{TEMPORARY_MARK}"
    shutil.rmtree(doomed, ignore_errors=True)
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.open(directory / str(step) / records.RECORD_FILE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if descriptor is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not even_if_held:
                    return False
            except OSError:
                pass  # a file system without flock
        os.rename(directory / str(step), doomed)
    finally:
        if descriptor is not None:
            os.close(descriptor)
    shutil.rmtree(doomed)
    return True


def remove(directory: Place, steps: Sequence[int]) -> None:
    """Deletes committed steps that a person names, all or none; never the last good one.

    Raises:
        CheckpointError: one is no committed step, or no good one would be left.
        CheckpointWriteError: one cannot be deleted.
    """
    have = records.committed_steps(directory)
    if unknown := sorted(set(steps) - set(have)):
        raise CheckpointError(
            f"checkpoint rm: {directory} has no step {unknown[0]}. A checkpoint is named by its step; it has steps "
            f"{', '.join(map(str, have)) or 'none'}. Name one of them."
        )
    left, _ = quarantine.newest_sound(directory, None, set(steps))
    good, _ = quarantine.newest_sound(directory, None, ())
    if left is None and good is not None:
        raise CheckpointError(
            f"checkpoint rm: step {good} is the last good checkpoint in {directory}. It is never removed: without it the run's work is lost. "
            "Leave it, or delete the run's whole directory by hand."
        )
    for step in steps:
        try:
            if not delete_step(directory, step):
                raise BlockingIOError("somebody reads it")
        except OSError as error:
            raise CheckpointWriteError(
                f"checkpoint rm: step {step} could not be deleted from {directory} ({records.first_line(error)}). The folder must be writable. "
                "Delete it by hand."
            ) from error


def remove_unfinished(directory: Place) -> list[str]:
    """Removes what a killed run left half written or half deleted; returns the names. Only the run's owner may call."""
    if isinstance(directory, Remote):
        return _remove_unmarked(directory)
    with os.scandir(directory) as entries:
        names = sorted(e.name for e in entries if TEMPORARY_MARK in e.name and e.is_dir(follow_symlinks=False))
    for name in names:
        shutil.rmtree(directory / name)
    return names


def _remove_unmarked(directory: Remote) -> list[str]:
    """Removes the folders of a bucket that have a step's name and hold nothing but what a save writes, without the
    marker at its end."""
    return [name for name in filter(is_step_name, location.names(directory)) if remove_unmarked(directory / name)]


def remove_unmarked(folder: Remote) -> bool:
    """Removes what a save that did not end has left of a step in a bucket; returns whether there was nothing but that.
    Only the run's owner may call."""
    if not set(folder.names()) <= {records.RECORD_FILE, records.STATE_FOLDER, "_CHECKPOINT_METADATA"}:
        return False
    location.remove(folder)
    return True
