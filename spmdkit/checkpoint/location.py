"""The folder of checkpoints: a local `Path` or a `Remote` in a bucket, and the operations that differ between them.

A bucket has no atomic renames, links, modes or locks. Objects are written atomically, and a marker object commits a
step.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from spmdkit.checkpoint.object_store import SCHEMES, Remote
from spmdkit.foundation import files

Location: TypeAlias = Path | Remote

MARKER = "commit_success.txt"
"""The last object of a committed step in a bucket; orbax uses the same name."""

RUN_FOLDER = "run"
"""Folder next to the steps of a bucket; contains the lease (lease.py) and the metrics of the run."""


def resolve(directory: Location | str) -> Location:
    """Returns the location of `directory`: a bucket folder for a URL, otherwise an absolute path."""
    if isinstance(directory, Remote):
        return directory
    text = str(directory)
    if is_url(text):
        return Remote(text.rstrip("/"))
    return Path(directory).absolute()


def is_url(text: str | Path) -> bool:
    """Returns whether a text is a bucket URL rather than a local path."""
    scheme, mark, _ = str(text).partition("://")
    return bool(mark) and scheme in SCHEMES


def split_step(text: str) -> tuple[str, int | str | None]:
    """Returns (run, step) of `runs/first@200`, `runs/first@best`, or `runs/first` (step None: the newest)."""
    match = re.fullmatch(r"(.+)@(best|\d{1,12})", text)
    return (text, None) if match is None else (match[1], "best" if match[2] == "best" else int(match[2]))


def names(directory: Location) -> list[str]:
    """Returns the names in a folder; empty if the folder does not exist."""
    if isinstance(directory, Remote):
        return [name for name in directory.names() if name != RUN_FOLDER]
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def exists(place: Location) -> bool:
    """Returns whether the path exists. A dangling link counts as existing."""
    return place.exists() if isinstance(place, Remote) else os.path.lexists(place)


def sizes(folder: Location) -> dict[str, int]:
    """Returns `{path below the folder: bytes}` of the existing files."""
    if isinstance(folder, Remote):
        return folder.sizes()
    bytes_of: dict[str, int] = {}
    for path, name in files.walk_files(folder):
        with contextlib.suppress(OSError):
            bytes_of[name] = os.stat(path).st_size
    return bytes_of


def remove(folder: Remote) -> None:
    """Deletes a bucket folder, the marker of a step first: a kill leaves no step that seems complete."""
    inside = folder.sizes()
    folder.remove([name for name in inside if name == MARKER])
    folder.remove([name for name in inside if name != MARKER])


def move(folder: Remote, to: Remote) -> None:
    """Moves a folder of a bucket: the copy is complete before the first source object is deleted."""
    folder.copy(list(folder.sizes()), to)
    remove(folder)


def upload(folder: Path, to: Remote, names: Iterable[str]) -> None:
    """Copies files of a local folder (`names`: relative paths) to a bucket folder, in this order."""
    for name in names:
        (to / name).upload(folder / name)


@contextlib.contextmanager
def local_copy(directory: Location, step: int, stage: Path | None = None) -> Iterator[Path]:
    """Yields a local directory that contains the step: `directory` itself, or a download that is deleted at the end.

    Args:
        stage: an existing folder with enough space for the step; default: the system's temporary folder.
    """
    if isinstance(directory, Path):
        yield directory
        return
    folder = Path(tempfile.mkdtemp(prefix="fetched-", dir=stage))
    try:
        source = directory / str(step)
        for name in source.sizes():
            with contextlib.suppress(FileNotFoundError):  # the file check reports it
                (source / name).download(folder / str(step) / name)
        files.restrict_permissions(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
