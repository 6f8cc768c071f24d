"""Every byte of a checkpoint read, leaf by leaf, as a restore would: no task, no model, no mesh, and the memory of one
leaf.

A step of a bucket is fetched first, into the system's temporary folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spmdkit.checkpoint import listing, location
from spmdkit.checkpoint import record as records
from spmdkit.checkpoint.location import Location
from spmdkit.errors import CheckpointError, DamagedError, Unreachable


def verify(directory: Location | str, step: int | None = None) -> list[dict[str, Any]]:
    """Returns a dict for each committed step, or of one: step, good, checked (its arrays have checksums), leaves,
    bytes, found (what is wrong).

    Raises:
        CheckpointError: there is no such step.
    """
    directory = location.resolve(directory)
    if step is not None and step not in records.committed_steps(directory):
        records.read_record(directory, step)  # raises with the steps that exist
    return [_verified(directory, s) for s in (records.committed_steps(directory) if step is None else [step])]


def _verified(directory: Location, step: int) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "good": False, "checked": False, "leaves": 0, "bytes": 0, "found": None}
    with listing.hold_step(directory, lambda: step):
        try:
            record = records.read_record(directory, step)
            row |= {"checked": record.schema > 1, "leaves": len(record.leaves), "bytes": record.bytes}
            records.check_files(directory, record)
            with location.fetched(directory, step) as here:
                _read_all(here, record)
        except DamagedError as error:
            return row | {"found": error.found}
        except Unreachable:
            raise
        except CheckpointError as error:
            return row | {"found": str(error)}
    return row | {"good": True}


def _read_all(directory: Path, record: records.Record) -> None:
    from spmdkit.checkpoint import orbax_backend

    for path, (shape, _) in record.leaves.items():
        if 0 in shape:
            continue  # lives in the record only
        try:
            orbax_backend.read_leaf(directory / str(record.step), path)
        except MemoryError:
            raise
        except Exception as error:
            raise records.damaged_error(
                directory, record.step, f"{path}: {records.first_line(records.root_cause(error))}"
            ) from error
