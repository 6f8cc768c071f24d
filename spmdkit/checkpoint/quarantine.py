"""Damaged checkpoints: detected before a run restores one, and renamed (quarantined), never deleted."""

from __future__ import annotations

import os
from collections.abc import Collection

from spmdkit.checkpoint import location
from spmdkit.checkpoint import record as records
from spmdkit.checkpoint.location import Location
from spmdkit.checkpoint.object_store import Remote
from spmdkit.errors import CheckpointError, CheckpointWriteError, DamagedError
from spmdkit.foundation import files
from spmdkit.foundation.constants import is_step_name

DAMAGED_MARK = ".damaged"


def newest_valid(directory: Location, most: int | None, without: Collection[int]) -> tuple[int | None, dict[int, str]]:
    """Returns (the newest step up to `most` with an intact record and intact files, step -> damage of newer steps).

    The bytes of the arrays are not read here; their checksums are verified on restore.
    """
    wrong: dict[int, str] = {}
    for step in reversed(records.committed_steps(directory)):
        if step in without or (most is not None and step > most):
            continue
        try:
            records.check_files(directory, records.read_record(directory, step))
        except DamagedError as error:
            wrong[step] = error.found
        else:
            return step, wrong
    return None, wrong


def steps_without_record(directory: Location) -> dict[str, str]:
    """Returns name -> problem for entries named like a step that are not a step. They would block the save of that
    step."""
    why = f"it has no {records.RECORD_FILE}, so it is incomplete"
    return {name: why for name in records.ignored_entries(directory) if is_step_name(name)}


def quarantine(directory: Location, name: str) -> str:
    """Renames `name` to `name.damaged` (or `name.damaged.2`, ...), which is not a step name; returns the new name.
    Raises CheckpointWriteError if it cannot be renamed."""
    renamed, number = f"{name}{DAMAGED_MARK}", 1
    while location.exists(directory / renamed):
        number += 1
        renamed = f"{name}{DAMAGED_MARK}.{number}"
    if isinstance(directory, Remote):
        location.move(directory / name, directory / renamed)
        return renamed
    try:
        os.rename(directory / name, directory / renamed)
        files.sync_folder(directory)
    except OSError as error:
        raise CheckpointWriteError(
            f"{directory / name} is damaged and could not be renamed to {renamed} ({records.first_line(error)}). "
            "It would block the save of this step. Rename it by hand and start again."
        ) from error
    return renamed


def no_valid_checkpoint(directory: Location, wrong: dict[str, str]) -> CheckpointError:
    """Returns the error for a directory in which all checkpoints are damaged."""
    shown = "".join(f"\n  {name}: {why}" for name, why in list(wrong.items())[:8])
    more = f"\n  and {len(wrong) - 8} more" if len(wrong) > 8 else ""
    return CheckpointError(
        f"every checkpoint in {directory} is damaged:{shown}{more}\nA run resumes from an intact checkpoint and never "
        "silently restarts from step 0. Restore one from a backup, or set run_dir to a new folder to start again "
        "from step 0."
    )
