"""The run directory: it is writable, and one active run owns it.

There are two flocks: on the folder, and on `run.lock`, which names the holder. The kernel releases both when the
process ends, so there is no stale lock. `run.lock` may be deleted by a user, but not the folder; NFS locks only files.
A fence stops writes of earlier attempts (ownership.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from spmdkit.checkpoint import location, ownership
from spmdkit.checkpoint.record import first_line
from spmdkit.errors import ConfigError
from spmdkit.foundation import files
from spmdkit.foundation.files import FILE_MODE, FOLDER_MODE

LOCK_FILE = "run.lock"


def prepare_run_dir(run_dir: Path | str) -> Path:
    """Creates the directory and writes a temporary file to it; returns its absolute path.

    Raises:
        ConfigError: it cannot be created or written (below a file, no permission, read-only disk).
        CheckpointWriteError: the disk is full.
    """
    path = Path(run_dir).absolute()
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"spmdkit")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise files.write_error(
            error,
            f"run_dir is {path}, which cannot be written ({first_line(error)}). A run needs its own folder "
            "with write permission and free space. Set run_dir to one.",
        ) from error
    return path


@contextlib.contextmanager
def run_lock(run_dir: Path | str) -> Iterator[None]:
    """Locks a run directory until the end of the body, or of the process.

    Raises:
        ConfigError: another process holds it (the message names its host and start time), or it is not writable.
    """
    folder = prepare_run_dir(run_dir)
    with contextlib.ExitStack() as stack:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        with contextlib.suppress(OSError):  # the file system does not lock folders
            _lock(descriptor, folder)
        path = folder / LOCK_FILE
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            text = (
                f"the lock {path} cannot be opened ({first_line(error)}). It must be a plain file, no link. Remove it."
            )
            raise files.write_error(error, text) from error
        stack.callback(os.close, descriptor)
        try:
            _lock(descriptor, folder)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(ownership.this_owner()).encode(), 0)
        except OSError as error:
            raise files.write_error(
                error,
                f"the lock {path} cannot be taken ({first_line(error)}). The file system of run_dir must offer flock. "
                "Set run_dir on another one.",
            ) from error
        # The file is not deleted: otherwise two runs could lock two files with the same name.
        stack.callback(os.ftruncate, descriptor, 0)
        yield


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"run directory {folder} is in use by {_owner_of(folder / LOCK_FILE)}. One run at a time may write to "
            "it. Wait for that run, end it, or set run_dir to another folder."
        ) from None


def _owner_of(path: Path) -> str:
    """Returns `process 12 on host since ...` of a lock. Its file may be empty between the lock and the write."""
    try:
        return ownership.describe_owner(ownership.parse_owner(files.read_regular(path, 4096)))
    except OSError:  # the file was deleted
        return ownership.last_owner(path.parent)


def checkpoints_of_run(run: str) -> location.Location:
    """Returns the location of the checkpoints of a run: in its directory, or the object store that `run` or its
    config.yaml names.

    Raises:
        ConfigError: it is no directory.
    """
    if location.is_url(run):
        return location.resolve(run)
    inside = Path(run) / "checkpoints"
    if not inside.is_dir() and (url := _bucket_of(Path(run))):
        return location.resolve(url)
    folder = inside if inside.is_dir() else Path(run)
    if not folder.is_dir():
        raise ConfigError(f"{run} is not a directory. Pass a run's directory, which holds checkpoints/.")
    return folder


def _bucket_of(run: Path) -> str | None:
    """Returns the `checkpoint.directory` of a run's config, or None."""
    import yaml

    try:
        directory = yaml.safe_load(files.read_regular(run / "config.yaml", 2**20))["checkpoint"]["directory"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError, RecursionError):
        return None
    return str(directory) if directory else None
