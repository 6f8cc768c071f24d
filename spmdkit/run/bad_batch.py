"""The batch of a non-finite step: its number, its rows, the non-finite rows, and a file with the batch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmdkit.data import HostBatch
from spmdkit.foundation import files
from spmdkit.foundation.trees import named_leaves
from spmdkit.program.program import Program

MAX_ROWS = 8  # in a message


def named(program: Program, step: int) -> str:
    """Returns `batch 12 (16 rows of train_data: 3, 17, 20 ...; row 17 is not finite in the data)`. Checks rows only of
    arrays in memory."""
    number, batch = program.schedule.number(step), program.schedule.batch(step)
    if batch is None:
        return f"batch {number} of {program.schedule.what}"
    indices, mask = batch
    rows = [int(i) for i in indices[mask]]
    text = f"batch {number} ({len(rows)} rows of {program.schedule.what}: {_listed(rows)}"
    bad = [int(indices[i]) for i in not_finite_rows(program.feed.read(step))] if program.feed.in_memory else []
    if bad:
        text += f"; {'rows' if bad[1:] else 'row'} {_listed(bad)} {'are' if bad[1:] else 'is'} not finite in the data"
    return f"{text})"


def _listed(rows: Sequence[int]) -> str:
    """Returns the first rows, or the range if the rows are consecutive."""
    if len(rows) > 2 and list(rows) == list(range(rows[0], rows[-1] + 1)):
        return f"{rows[0]} to {rows[-1]}"
    return ", ".join(map(str, rows[:MAX_ROWS])) + (" ..." if len(rows) > MAX_ROWS else "")


def not_finite_rows(batch: HostBatch) -> list[int]:
    """Returns the positions in a batch, without padding, of rows with a NaN or an infinity."""
    leaves = [x for x in jax.tree.leaves(batch.examples) if np.issubdtype(x.dtype, np.inexact)]
    bad = [~np.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in leaves]
    if not bad:
        return []
    is_bad = np.logical_or.reduce(bad) & (True if batch.mask is None else batch.mask)
    return [int(i) for i in np.flatnonzero(is_bad)]


def save(program: Program, step: int, folder: Path) -> Path:
    """Writes the complete batch of a step to `folder/<step>.npz`, with `rows` (indices in the data) and `mask`; returns
    the path. Raises OSError if it cannot be written."""
    batch = program.schedule.batch(step)
    assert batch is not None, "refused for streams"
    indices, mask = batch
    arrays: dict[str, Any] = {
        f"examples/{path}" if path else "examples": x for path, x in named_leaves(program.feed.read(step).examples)
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step}.npz"
    secret = lambda name, flags: os.open(name, flags, 0o640)
    with files.atomic_path(path) as partial, open(partial, "xb", opener=secret) as file:
        np.savez(file, rows=indices, mask=mask, **arrays)
    return path
