"""Atomic writes: a temporary file is written, synced to disk, and renamed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from spmdkit.errors import CheckpointWriteError, ConfigError, SpmdkitError

PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
"""The folder of spmdkit, to separate its frames in a traceback from the user's frames."""


_PARTIAL = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.partial")

MAX_READ_BYTES = 2**31
"""Maximum size of a file that is read whole."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a full or failing disk, which a restart may not meet again."""
FILE_MODE, FOLDER_MODE = 0o640, 0o750
"""Maximum permissions of a file or folder of a run."""


def user_cache(environ: Mapping[str, str]) -> Path:
    """Returns the user's cache folder of spmdkit. It cannot be created for a user without a home directory."""
    base, home = environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    if not os.path.isabs(base):
        base = os.path.join(home if os.path.isabs(home) and home != os.sep else "/nonexistent", ".cache")
    return Path(base) / "spmdkit"


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path for a file or folder, which replaces `path` at the end, or is deleted after an exception.

    A file replaces an existing file. Readers see either the old or the new file.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        restrict_permissions(partial)
        os.replace(partial, path)
    finally:
        _remove(partial)


def remove_unfinished(folder: Path, others: tuple[str, ...]) -> None:
    """Removes the partial files of killed writers from a folder that only the caller writes. `others`: files there with
    other writers."""
    for path in folder.glob(".*.partial"):
        match = _PARTIAL.fullmatch(path.name)
        if match is not None and match["name"] not in others:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def restrict_permissions(path: Path) -> None:
    """Removes all permissions of other users, and the group's write permission, from a file or from a folder and its
    contents. Links are not followed."""
    for parent, folders, names in os.walk(path):
        for name in (*folders, *names):
            _chmod(os.path.join(parent, name))
    _chmod(path)


def walk_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields (path, path relative to `folder`) of every file in it, as strings. Each new name in a `Path` would stay in
    CPython's table of interned strings (up to 3.11 until the table is rebuilt, from 3.12 on permanently)."""
    top = os.fspath(folder)
    for parent, _, names in os.walk(top):
        for name in names:
            path = os.path.join(parent, name)
            yield path, os.path.relpath(path, top)


def _chmod(path: str | Path) -> None:
    with contextlib.suppress(OSError):  # owned by another user, or deleted
        mode = os.lstat(path).st_mode
        most = FOLDER_MODE if stat.S_ISDIR(mode) else FILE_MODE
        if (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and stat.S_IMODE(mode) & ~most:
            os.chmod(path, stat.S_IMODE(mode) & most)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file to read. Raises OSError for a link, a FIFO, a device or a folder: a read may block or never
    end, or return a file outside of the run."""
    return os.fdopen(_open_regular(path, os.O_RDONLY), "rb")


def open_append(path: str | os.PathLike[str]) -> int:
    """Returns a descriptor to append to and read a regular file, created if missing. Raises OSError like
    `open_regular`."""
    return _open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)


def _open_regular(path: str | os.PathLike[str], flags: int) -> int:
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # O_NONBLOCK: a FIFO does not wait
    try:
        descriptor = os.open(path, flags | safe, FILE_MODE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", os.fspath(path)) from None
        raise
    if stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    why = os.strerror(number) if stat.S_ISDIR(mode) else f"it is {kind_of(mode)}"
    raise OSError(number, why, os.fspath(path))


def kind_of(mode: int) -> str:
    """Returns what an entry of a folder is, for messages. `mode`: its `st_mode`."""
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFLNK: "a link", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_regular(path: str | os.PathLike[str], max_bytes: int = MAX_READ_BYTES) -> bytes:
    """Returns the content of a regular file. Raises OSError like `open_regular`, and for a larger file."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise OSError(errno.EINVAL, f"it has {size} bytes, at most {max_bytes} are read", os.fspath(path))
        return file.read(max_bytes)


def special_entry(folder: Path) -> str | None:
    """Returns a description of an entry below `folder` that is no regular file and no folder, or None."""
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(parent, name)
            with contextlib.suppress(FileNotFoundError):
                mode = os.lstat(path).st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    return f"{os.path.relpath(path, folder)} is {kind_of(mode)}"
    return None


def replace(path: str | os.PathLike[str], content: bytes, mode: int = FILE_MODE) -> None:
    """Replaces `path` by `content`, which is on disk on return. Raises OSError on failure."""
    with atomic_path(path) as partial:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(Path(path).parent)


def sync_folder(folder: Path) -> None:
    """Syncs the names in `folder` to disk. Only then does a rename survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(content: bytes) -> str:
    """Returns 64 bits of BLAKE2b as 16 hex digits, for files of kilobytes. Arrays use `checksum.py` and the checksums
    of checkpoint/orbax_backend.py."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def digest_file(path: str | os.PathLike[str]) -> str:
    """Returns the `digest` of a regular file, read in parts. Raises OSError like `open_regular`."""
    hashed = hashlib.blake2b(digest_size=8)
    with open_regular(path) as file:
        while part := file.read(2**20):
            hashed.update(part)
    return hashed.hexdigest()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replaces `path` by `text` (UTF-8). Raises `not_writable` if it cannot be written."""
    try:
        replace(path, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise not_writable(Path(path), error) from error


def write_requested(option: str, path: Path, text: str) -> None:
    """Replaces the file that an option of a command names. Raises ConfigError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise ConfigError(
            f"{option} {path} cannot be written ({error.strerror}). Choose a file in a writable folder."
        ) from error


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Replaces `path` by `value` as indented strict JSON. Raises `not_writable` if it cannot be written."""
    write_text(path, json.dumps(strict_json(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def json_object(content: bytes) -> dict[str, Any] | None:
    """Returns the JSON object in `content`, or None for any other content."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    return value if isinstance(value, dict) else None


def strict_json(value: Any) -> Any:
    """Returns `value` with non-finite floats as the strings "NaN", "Infinity", "-Infinity", scalar arrays as numbers,
    paths as strings."""
    if type(value) is int or type(value) is str or (type(value) is float and math.isfinite(value)):
        return value  # the most common case
    if isinstance(value, Mapping):
        return {str(k): strict_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(v) for v in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # of numpy or JAX
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def not_writable(path: Path, error: OSError) -> SpmdkitError:
    """Returns the error for a run's file that cannot be written."""
    return write_error(
        error,
        f"{path}: cannot be written: {error.strerror or error} (error {error.errno}). A run needs a writable folder "
        "with space for its files; earlier files are intact. Free space or fix the permissions, or set run_dir to "
        "another folder, and start the same command again.",
    )


def write_error(error: OSError, text: str) -> SpmdkitError:
    """Returns the error `text`: a full or failing disk ends with the exit code of a failed save, in every phase."""
    return (CheckpointWriteError if error.errno in NO_ROOM else ConfigError)(text)


def not_written(path: Path, error: OSError) -> CheckpointWriteError:
    """Returns the error for a run's file that can no longer be written because the disk is full or missing."""
    return CheckpointWriteError(str(not_writable(path, error)))
