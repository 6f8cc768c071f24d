"""Reasons to refuse a save, and the error of a failed save."""

from __future__ import annotations

import contextlib
import os

from spmdkit.checkpoint import location, retention
from spmdkit.checkpoint import record as records
from spmdkit.checkpoint.location import Location
from spmdkit.checkpoint.object_store import Remote
from spmdkit.errors import CheckpointWriteError, Unreachable
from spmdkit.foundation.formatting import format_bytes

FREE_MARGIN_BYTES = 2**20
"""Space for metadata in addition to the arrays."""


def refusal_reason(directory: Location, written: Location, step: int, num_bytes: int) -> str:
    """Returns why a save is not started, or an empty string.

    Args:
        written: where orbax writes the step: `directory`, or a local folder on the way to it.
        num_bytes: of all arrays together.
    """
    folder = directory / str(step)
    try:
        # Of a save that failed, what its threads still wrote when it was removed.
        taken = location.exists(folder) and not (isinstance(folder, Remote) and retention.remove_uncommitted(folder))
    except Unreachable as error:
        return f"saving step {step}: {error}"
    if taken:
        there = step in records.committed_steps(directory)
        what = "is already saved" if there else f"has no {records.RECORD_FILE}, so it is not ours"
        return (
            f"saving step {step} to {folder}: the folder exists and {what}. A committed step is never overwritten. "
            f"Delete or rename {folder}."
        )
    if isinstance(written, Remote):
        return ""
    try:
        disk = os.statvfs(written)
    except OSError as error:
        return (
            f"saving step {step} to {folder}: {written} cannot be used ({records.first_line(error)}). "
            "It must stay in place while the run lives. Bring it back and start again."
        )
    free, needed = disk.f_bavail * disk.f_frsize, num_bytes + FREE_MARGIN_BYTES
    if free >= needed:
        return ""
    return (
        f"saving step {step} to {folder} needs about {format_bytes(needed)}, {format_bytes(free)} are free. A save "
        "that would fill the disk is not started; earlier checkpoints are intact. Free some space, lower "
        "checkpoint.keep, or set run_dir on another disk."
    )


def save_failed(directory: Location, step: int, error: BaseException) -> CheckpointWriteError:
    """Returns the error of a save that was started and failed."""
    have = "those before"
    with contextlib.suppress(Unreachable):
        have = ", ".join(map(str, records.committed_steps(directory))) or "none yet"
    return CheckpointWriteError(
        f"saving step {step} to {directory / str(step)} failed ({records.first_line(error)}). "
        f"A checkpoint counts only when it is committed; intact are {have}. "
        "Fix the cause and start the same command again."
    )
