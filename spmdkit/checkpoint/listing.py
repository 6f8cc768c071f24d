"""Lists, inspects and verifies the checkpoints of a directory, selects the newest and the best, and holds a step during
a read."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spmdkit.checkpoint import location
from spmdkit.checkpoint import record as records
from spmdkit.checkpoint.location import Location
from spmdkit.checkpoint.object_store import Remote
from spmdkit.errors import CheckpointError, DamagedError, UnreachableError
from spmdkit.foundation import files
from spmdkit.foundation.formatting import format_bytes

HOLD_TRIES = 100


@contextlib.contextmanager
def hold_step(directory: Location, choose: Callable[[], int]) -> Iterator[int]:
    """Yields the step that `choose` returns. The run that writes to this directory does not delete it during the body.

    If the step is deleted before it is held, `choose` is called again. The hold is a shared flock on the record.
    Buckets and file systems without flock do not support holds.
    """
    if isinstance(directory, Remote):
        yield choose()
        return
    for _ in range(HOLD_TRIES):
        step = choose()
        path = directory / str(step) / records.RECORD_FILE
        with contextlib.ExitStack() as stack:
            try:
                record = stack.enter_context(files.open_regular(path))
                fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if path.stat().st_ino != os.fstat(record.fileno()).st_ino:
                    continue
            except BlockingIOError:
                continue
            except OSError:  # deleted, not readable (the read raises), or a file system without flock
                if not path.parent.is_dir():
                    continue
            yield step
            return
    yield choose()


def choose_step(directory: Location, step: int | str | None) -> int:
    """Returns a step that is named by its number, as `best`, or not (the newest)."""
    if step == "best":
        return best_step(directory)
    return newest_step(directory) if step is None else int(step)


def best_step(directory: Location) -> int:
    """Returns the best committed step by the rule `checkpoint.best` of the newest record that has one.

    Raises:
        CheckpointError: no checkpoint has such a rule, or a value for it.
    """
    scores = _scores(directory)
    if not scores:
        raise CheckpointError(
            f"the best checkpoint is requested, and no checkpoint in {directory} has the metric of checkpoint.best. "
            "It is saved when an evaluation improves. Set checkpoint: {best: {metric: loss}} and "
            "eval.every_steps, or name a step."
        )
    return scores[-1][1]


def _scores(directory: Location) -> list[tuple[float, int]]:
    """Returns (score, step), ascending by score, of the steps with a value for the rule of the newest record that has
    one."""
    valid = []
    for step in records.committed_steps(directory):
        with contextlib.suppress(CheckpointError):
            valid.append(records.read_record(directory, step))
    rule = next((record.best for record in reversed(valid) if record.best is not None), None)
    if rule is None:
        return []
    metric, mode = rule
    sign = 1.0 if mode == "max" else -1.0
    return sorted((sign * value, record.step) for record in valid if (value := record.metrics.get(metric)) is not None)


def ls(directory: Location | str) -> list[dict[str, Any]]:
    """Returns one dict per committed step, ascending: step, bytes (on disk), time, metrics, complete, problem, found,
    best.

    `problem` describes the damage and the repair, `found` only the damage, of the record and the files. `verify` also
    reads the bytes of the arrays.
    """
    directory = location.resolve(directory)
    rows = [_summary(directory, step) for step in records.committed_steps(directory)]
    scores = _scores(directory)
    best = scores[-1][1] if scores else None
    return [row | {"best": row["step"] == best} for row in rows if row is not None]


def _summary(directory: Location, step: int) -> dict[str, Any] | None:
    """Returns the row of a step; None if it was deleted."""
    folder = directory / str(step)
    row: dict[str, Any] = {"step": step, "time": None, "metrics": {}, "complete": False, "problem": None, "found": None}
    try:
        record = records.read_record(directory, step)
        row |= {"time": record.time, "metrics": record.metrics}
        records.check_files(directory, record)
        row["complete"] = True
    except CheckpointError as error:
        row |= {"problem": str(error), "found": error.found if isinstance(error, DamagedError) else str(error)}
    row["bytes"] = sum(location.sizes(folder).values())
    return row if folder.exists() else None


def inspect(directory: Location | str, step: int | None = None) -> dict[str, Any]:
    """Returns the row of `ls` for a step (None: the newest), with leaves, state_bytes, num_processes and record.

    Raises:
        CheckpointError: the step does not exist, or its record is damaged.
    """
    directory = location.resolve(directory)
    with hold_step(directory, lambda: newest_step(directory) if step is None else step) as chosen:
        record = records.read_record(directory, chosen)
        return (_summary(directory, record.step) or {}) | {
            "num_processes": record.num_processes,
            "state_bytes": record.bytes,
            "state_size": format_bytes(record.bytes),
            "leaves": {path: {"shape": list(shape), "dtype": dtype} for path, (shape, dtype) in record.leaves.items()},
            "record": record.user,
        }


def newest_step(directory: Location) -> int:
    """Returns the newest committed step. Raises CheckpointError if there is none."""
    steps = records.committed_steps(directory)
    if not steps:
        raise CheckpointError(
            f"a checkpoint is requested, but {directory} holds none. A checkpoint is a folder named by its step with "
            f"a {records.RECORD_FILE} in it. Train first, or name the checkpoints folder of another run."
        )
    return steps[-1]


def verify(directory: Location | str, step: int | None = None) -> list[dict[str, Any]]:
    """Reads every byte of one or all committed steps, leaf by leaf, as a restore does. Needs no task, no mesh, and the
    memory of one leaf. A step in a bucket is downloaded first. Returns a dict per step: step, good, leaves, bytes,
    found (the damage).

    Raises:
        CheckpointError: the step does not exist.
    """
    directory = location.resolve(directory)
    if step is not None and step not in records.committed_steps(directory):
        records.read_record(directory, step)  # the error lists the existing steps
    return [_verified(directory, s) for s in (records.committed_steps(directory) if step is None else [step])]


def _verified(directory: Location, step: int) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "good": False, "leaves": 0, "bytes": 0, "found": None}
    with hold_step(directory, lambda: step):
        try:
            record = records.read_record(directory, step)
            row |= {"leaves": len(record.leaves), "bytes": record.bytes}
            records.check_files(directory, record)
            with location.local_copy(directory, step) as local:
                _read_all(local, record)
        except DamagedError as error:
            return row | {"found": error.found}
        except UnreachableError:
            raise
        except CheckpointError as error:
            return row | {"found": str(error)}
    return row | {"good": True}


def _read_all(directory: Path, record: records.Record) -> None:
    from spmdkit.checkpoint import orbax_backend

    for path, (shape, _) in record.leaves.items():
        if 0 in shape:
            continue  # in the record only
        try:
            orbax_backend.read_leaf(directory / str(record.step), path)
        except MemoryError:
            raise
        except Exception as error:
            raise records.damaged_error(
                directory, record.step, f"{path}: {records.first_line(records.root_cause(error))}"
            ) from error
