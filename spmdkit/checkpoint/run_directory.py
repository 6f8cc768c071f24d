"""A run's directory: can be written, and belongs to one live run.

The lock is a flock on the folder itself, and one on `run.lock`, which also names its holder: the kernel drops them
when their process dies, however it dies, so there is no stale lock to take over. `run.lock` looks like something to
remove, the folder does not; but NFS locks files only. Who was in the folder before is kept out by a fence
(ownership.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

from spmdkit.checkpoint import ownership
from spmdkit.checkpoint.record import first_line
from spmdkit.errors import ConfigError
from spmdkit.foundation.files import FILE_MODE, FOLDER_MODE

LOCK_FILE = "run.lock"


def prepare_run_dir(run_dir: Path | str) -> Path:
    """Makes the directory and writes and removes a small file in it; returns its absolute path.

    Raises:
        ConfigError: it cannot be made or written (below a file, no permission, read-only or full disk).
    """
    path = Path(run_dir).absolute()
    probe = path / f".write_probe-{secrets.token_hex(8)}"  # an unpredictable name, so no link can exist under it
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(b"spmdkit")
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"run_dir is {path}, which cannot be written ({first_line(error)}). A run needs its own folder that "
            "it may write to. Set run_dir to one."
        ) from error
    return path


class RunLock:
    """Exclusive use of a run directory, held from `acquire` (or `with`) until `release` or the process's end.

    Raises:
        ConfigError: another process holds it, named with its host and since when; or the directory is not writable.
    """

    def __init__(self, run_dir: Path | str):
        self.path = Path(run_dir).absolute() / LOCK_FILE
        self._descriptor: int | None = None
        self._folder: int | None = None

    def acquire(self) -> Self:
        prepare_run_dir(self.path.parent)
        self._folder = _lock_folder(self.path.parent)
        try:
            self._descriptor = self._locked_file()
        except BaseException:
            self.release()
            raise
        return self

    def _locked_file(self) -> int:
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise ConfigError(
                f"the lock {self.path} cannot be opened ({first_line(error)}). It must be a plain file, no link. "
                "Remove it."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(ownership.this_owner()).encode(), 0)
        except OSError as error:
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise ConfigError(
                    f"the lock {self.path} cannot be taken ({first_line(error)}). The file system of run_dir must "
                    "offer flock. Set run_dir on another one."
                ) from error
            raise _in_use(self.path.parent) from None
        return descriptor

    def release(self) -> None:
        """Gives the directory back. The file stays: removing it would let two runs lock two files of one name."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.ftruncate(descriptor, 0)
            os.close(descriptor)
        if self._folder is not None:
            folder, self._folder = self._folder, None
            os.close(folder)

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def _lock_folder(folder: Path) -> int | None:
    """Returns the descriptor of the locked folder; None where its file system locks no folders.

    Raises:
        ConfigError: another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            return None
        raise _in_use(folder) from None
    return descriptor


def _in_use(directory: Path) -> ConfigError:
    """Returns the error of a directory that another run holds."""
    return ConfigError(
        f"run directory {directory} is in use by {_owner_of(directory / LOCK_FILE)}. One run at a time may write to "
        "it. Wait for that run, end it, or set run_dir to another folder."
    )


def _owner_of(path: Path) -> str:
    """Returns `process 12 on host since ...` of a lock; its file may be empty for the moment between lock and write."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
            return ownership.described(ownership.parsed(file.read(4096)))
    except OSError:  # it was removed
        return ownership.last_owner(path.parent)
