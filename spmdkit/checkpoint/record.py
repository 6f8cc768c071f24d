"""record.json, the description that makes a step directory a checkpoint, and the list of steps in a directory.

    {"schema": 2, "digest": "8c9a...", "step": 40, "time": 1795212345.6, "num_processes": 1, "bytes": 12582912,
     "metrics": {"loss": 0.31}, "best": ["loss", "min"], "leaves": {"params/w": [[64, 128], "float32"]},
     "files": {"state/manifest.ocdbt": 113}, "digests": {"state/manifest.ocdbt": "06d1..."}, "record": {the caller's}}

The record is written after all arrays and before the rename. It contains the size of each file, so a truncated or
missing file is detected without reading it. orbax's metadata and small files also have a digest, and chunks of arrays
have a checksum (orbax_backend.py).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdkit.checkpoint import location
from spmdkit.checkpoint.location import Location
from spmdkit.checkpoint.object_store import Remote
from spmdkit.checkpoint.state_dict import LeafTable
from spmdkit.errors import CheckpointError, DamagedError
from spmdkit.foundation import files
from spmdkit.foundation.constants import is_step_name

SCHEMA = 2
SMALL_FILE_BYTES = 2**22
"""Array files up to this size, which contain many small leaves, have a digest."""
MAX_RECORD_BYTES, MAX_METADATA_BYTES = 2**26, 2**30
"""Maximum sizes of record.json and of a file that contains no arrays, which are read whole."""
DATA_FOLDER = "d"
"""Folder in which OCDBT stores array data."""
RECORD_FILE = "record.json"
STATE_FOLDER = "state"
INDEX_FOLDER = "ocdbt_meta"
"""Folder of the indexes if they are separate from the arrays; orbax uses the same name."""
TEMPORARY_MARK = ".orbax-checkpoint-tmp"
"""Part of the name of every directory that is being written (by orbax) or deleted (by spmdkit)."""


@dataclasses.dataclass(frozen=True)
class Record:
    """The content of one record.json. `user`: the user record; `bytes`: the size of the arrays in memory."""

    step: int
    time: float
    num_processes: int
    bytes: int
    metrics: dict[str, float | None]
    leaves: LeafTable
    files: dict[str, int]
    user: dict[str, Any]
    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    best: tuple[str, str] | None = None


def write_record(folder: Location, record: Record) -> None:
    """Writes record.json to `folder` and syncs the file and the folder to disk."""
    content = vars(record) | {"schema": SCHEMA, "metrics": finite_metrics(record.metrics)}
    content["record"] = content.pop("user")
    text = json.dumps({"digest": _digest_of(content)} | content, allow_nan=False)
    if isinstance(folder, Remote):
        (folder / RECORD_FILE).write_bytes(text.encode())
        return
    with open(folder / RECORD_FILE, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    files.sync_folder(folder)


def _digest_of(content: Mapping[str, Any]) -> str:
    """Returns the digest of a record's content, independent of the order of its keys."""
    return files.digest(json.dumps(content, sort_keys=True).encode())


def finite_metrics(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Returns the metrics as JSON values: NaN and infinity become null."""
    return {k: float(v) if v is not None and math.isfinite(v) else None for k, v in metrics.items()}


def list_files(folder: Location) -> dict[str, int]:
    """Returns `{path below folder: bytes}` of every file of the state below `folder`."""
    return {f"{STATE_FOLDER}/{name}": size for name, size in sorted(location.sizes(folder / STATE_FOLDER).items())}


def digest_files(folder: Location, sizes: Mapping[str, int]) -> dict[str, str]:
    """Returns `{path below folder: digest}` of the files that each restore reads again: all except large array
    files."""
    small = [name for name, size in sizes.items() if size <= SMALL_FILE_BYTES or not _has_arrays(name)]
    return {name: _digest_file(folder / name) for name in small}


def _has_arrays(name: str) -> bool:
    return DATA_FOLDER in name.split("/")[:-1]


def _digest_file(file: Location) -> str:
    return files.digest(file.read_bytes()) if isinstance(file, Remote) else files.digest_file(file)


def committed_steps(directory: Location) -> list[int]:
    """Returns the steps in `directory`, ascending: folders named by a plain integer with a record and, in a bucket, the
    marker.

    A damaged checkpoint is also listed: if it were omitted, training would silently continue from an older one.
    """
    return sorted(int(name) for name in location.names(directory) if _is_step(directory / name))


def ignored_entries(directory: Location | str) -> list[str]:
    """Returns the names in `directory` that are not committed steps, sorted: unrelated, empty or unfinished entries."""
    directory = location.resolve(directory)
    return sorted(name for name in location.names(directory) if not _is_step(directory / name))


def _is_step(path: Location) -> bool:
    if not is_step_name(path.name):
        return False
    if isinstance(path, Remote):
        return {RECORD_FILE, location.MARKER} <= set(path.names())
    try:
        return (path / RECORD_FILE).is_file()
    except OSError:  # no permission: the name is that of a step, and reading it raises
        return True


def read_record(directory: Location, step: int) -> Record:
    """Returns the record of a committed step.

    Raises:
        CheckpointError: the step does not exist, or its record is damaged or from a newer spmdkit.
    """
    folder = directory / str(step)
    try:
        file = folder / RECORD_FILE
        content = json.loads(
            file.read_bytes() if isinstance(file, Remote) else files.read_regular(file, MAX_RECORD_BYTES)
        )
        schema = content["schema"]
    except (FileNotFoundError, NotADirectoryError):
        have = committed_steps(directory)
        held = f"has steps {', '.join(map(str, have))}" if have else "holds no checkpoint"
        raise CheckpointError(
            f"step {step} is requested, but {directory} {held}. "
            f"A checkpoint is a folder named by its step with a {RECORD_FILE} in it. "
            + (f"Request step {have[-1]}." if have else "Train first, or name the folder of another run.")
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged_error(directory, step, f"{RECORD_FILE} cannot be read ({first_line(error)})") from error
    if schema != SCHEMA:
        raise CheckpointError(
            f"{folder} has a record of schema {schema}; this spmdkit reads schema {SCHEMA}. "
            "Use the version of spmdkit that wrote it (it is named in the record)."
        )
    if content.pop("digest", None) != _digest_of(content):
        raise damaged_error(directory, step, f"{RECORD_FILE} differs from what was written (its digest does not match)")
    if content.get("step") != step:
        raise damaged_error(directory, step, f"{RECORD_FILE} is of step {content.get('step')}; the folder was renamed")
    try:
        return Record(
            step=int(content["step"]),
            time=float(content["time"]),
            num_processes=int(content["num_processes"]),
            bytes=int(content["bytes"]),
            metrics=dict(content["metrics"]),
            leaves={path: (tuple(shape), dtype) for path, (shape, dtype) in content["leaves"].items()},
            files={path: int(size) for path, size in content["files"].items()},
            user=dict(content["record"]),
            digests=dict(content["digests"]),
            best=tuple(content["best"]) if content["best"] else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise damaged_error(
            directory, step, f"{RECORD_FILE} differs from what was written ({first_line(error)})"
        ) from error


def check_files(directory: Location, record: Record) -> None:
    """Raises DamagedError if a file of the checkpoint is missing or its size, or for a small file its content, differs
    from the record, or if an entry is no regular file. orbax opens files only after this check."""
    folder = directory / str(record.step)
    if isinstance(folder, Path) and (special := files.special_entry(folder)) is not None:
        raise damaged_error(directory, record.step, f"{special}; a checkpoint has only regular files")
    actual = location.sizes(folder)
    wrong = [
        f"{name} has {size} bytes, at most {MAX_METADATA_BYTES} are read"
        for name, size in actual.items()
        if size > MAX_METADATA_BYTES and not _has_arrays(name)
    ]
    for name, size in record.files.items():
        try:
            if actual[name] != size:
                wrong.append(f"{name} has {actual[name]} bytes, {size} were written")
            elif name in record.digests and _digest_file(folder / name) != record.digests[name]:
                wrong.append(f"{name} differs from what was written")
        except (KeyError, OSError):
            wrong.append(f"{name} is missing")
    if wrong:
        raise damaged_error(directory, record.step, f"{wrong[0]} ({len(wrong)} of {len(record.files)} files damaged)")


def damaged_error(directory: Location, step: int, found: str) -> DamagedError:
    """Returns the error for a damaged checkpoint, with the steps to return to an earlier one."""
    earlier = [other for other in committed_steps(directory) if other < step]
    back = f"to return to step {earlier[-1]}" if earlier else "to start again from step 0; there is no earlier step"
    return DamagedError(
        f"the checkpoint {directory / str(step)} is damaged: {found}. "
        f"A checkpoint must be intact. Delete or rename {directory / str(step)} {back}.",
        found,
    )


def first_line(error: BaseException) -> str:
    """Returns the type and first line of an error; of a long line both ends, because the cause is often at the end."""
    text = str(error).strip().split("\n")[0]
    if len(text) > 300:
        text = f"{text[:120]} ... {text[-175:]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def root_cause(error: BaseException) -> BaseException:
    """Returns the innermost cause: orbax wraps errors of tensorstore."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
