"""Which checkpoints stay: the last k and the best by a metric; and deleting so that a kill leaves no half step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from spmdkit.checkpoint.record import TEMPORARY_MARK

Mode = Literal["min", "max"]


def steps_to_delete(
    steps: Sequence[int], just_written: int, keep: int, scores: Mapping[int, float | None], mode: Mode
) -> list[int]:
    """Returns the steps that go, ascending: all but the newest `keep`, the best scored one and the one just written.

    A step without a score (or with one that is not finite, stored as None) is never the best; of equals the newest is.
    """
    ordered = sorted(steps)
    kept = {*ordered[-keep:], just_written}
    scored = [(score, step) for step in ordered if (score := scores.get(step)) is not None]
    if scored:
        sign = 1.0 if mode == "max" else -1.0
        kept.add(max(scored, key=lambda pair: (sign * pair[0], pair[1]))[1])
    return [step for step in ordered if step not in kept]


def delete_step(directory: Path, step: int) -> None:
    """Deletes a committed step. It is renamed first: a kill in between leaves a folder that is no step."""
    doomed = directory / f"{step}.deleted{TEMPORARY_MARK}"
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(directory / str(step), doomed)
    shutil.rmtree(doomed)


def remove_unfinished(directory: Path) -> list[str]:
    """Removes what a killed run left half written or half deleted; returns the names. Only the run's owner may call."""
    with os.scandir(directory) as entries:
        names = sorted(e.name for e in entries if TEMPORARY_MARK in e.name and e.is_dir(follow_symlinks=False))
    for name in names:
        shutil.rmtree(directory / name)
    return names
