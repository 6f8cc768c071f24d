"""Leaves of a step as numpy arrays, without a model or a mesh: for export, and to compare two runs."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from spmdkit.checkpoint import listing, record, state_dict


def read_leaves(directory: Path, found: record.Record, part: state_dict.LeafTable) -> dict[str, np.ndarray]:
    """Returns `{path: array}` of some leaves of a step, none of them a random key.

    Raises:
        DamagedError: they cannot be read.
    """
    from spmdkit.checkpoint import orbax_backend

    abstract = {path: jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)) for path, (shape, dtype) in part.items()}
    try:
        loaded = orbax_backend.load_numpy(
            directory / str(found.step), state_dict.nest({path: leaf for path, leaf in abstract.items() if leaf.size})
        )
    except Exception as error:
        raise record.damaged_error(directory, found.step, record.first_line(error)) from error
    return {
        path: state_dict.pick(loaded, path) if leaf.size else np.zeros(leaf.shape, leaf.dtype)
        for path, leaf in abstract.items()
    }


def read_state(directory: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Returns `{path: array}` of the whole state of a step (the newest for None), without random keys, which follow
    from the seed and the step.

    Raises:
        CheckpointError: there is no such step, or it is damaged.
    """
    with listing.hold_step(directory, lambda: listing.newest_step(directory) if step is None else step) as chosen:
        found = record.read_record(directory, chosen)
        record.check_files(directory, found)
        part = {path: leaf for path, leaf in found.leaves.items() if not leaf[1].startswith("key<")}
        return read_leaves(directory, found, part)
