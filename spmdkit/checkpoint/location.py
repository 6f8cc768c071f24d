"""The folder of checkpoints: a local one (`Path`) or one of a bucket (`Remote`), and what differs between the two.

A bucket has no atomic renames, links, modes and locks: an object exists whole or not at all, and a marker commits a
step.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from spmdkit.checkpoint.object_store import SCHEMES, Remote
from spmdkit.foundation import files

Location: TypeAlias = Path | Remote

MARKER = "commit_success.txt"
"""The last object of a committed step in a bucket: orbax's own name for it."""

RUN_FOLDER = "run"
"""Folder next to the steps of a bucket, with the lease (lease.py) and the metrics of the run."""


def resolve(directory: Location | str) -> Location:
    """Returns where `directory` is: of a URL the folder of a bucket, of everything else an absolute path."""
    if isinstance(directory, Remote):
        return directory
    text = str(directory)
    if is_url(text):
        return Remote(text.rstrip("/"))
    return Path(directory).absolute()


def is_url(text: str | Path) -> bool:
    """Returns whether a text names a bucket, and not a local path."""
    scheme, mark, _ = str(text).partition("://")
    return bool(mark) and scheme in SCHEMES


def names(directory: Location) -> list[str]:
    """Returns the names in a folder; none where it is not there."""
    if isinstance(directory, Remote):
        return [name for name in directory.names() if name != RUN_FOLDER]
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def exists(place: Location) -> bool:
    """Returns whether something is there, a link that leads nowhere too."""
    return place.exists() if isinstance(place, Remote) else os.path.lexists(place)


def sizes(folder: Location) -> dict[str, int]:
    """Returns `{path below the folder: bytes}` of the files that are there."""
    if isinstance(folder, Remote):
        return folder.sizes()
    found: dict[str, int] = {}
    for path, name in files.below(folder):
        with contextlib.suppress(OSError):
            found[name] = os.stat(path).st_size
    return found


def remove(folder: Remote) -> None:
    """Removes a folder of a bucket, the marker of a step first: a kill in between leaves none that looks whole."""
    inside = folder.sizes()
    folder.remove([name for name in inside if name == MARKER])
    folder.remove([name for name in inside if name != MARKER])


def move(folder: Remote, to: Remote) -> None:
    """Moves a folder of a bucket: the copy is whole before the first object of it goes."""
    folder.copy(list(folder.sizes()), to)
    remove(folder)


def upload(folder: Path, to: Remote, names: Iterable[str]) -> None:
    """Copies files of a local folder, given by their paths in it, into one of a bucket, in this order."""
    for name in names:
        (to / name).upload(folder / name)


@contextlib.contextmanager
def fetched(directory: Location, step: int, stage: Path | None = None) -> Iterator[Path]:
    """Yields a local directory that holds the step: `directory` itself, or one into which it was fetched, removed at
    the end.

    Args:
        stage: an existing folder with room for the step; default: the system's temporary one.
    """
    if isinstance(directory, Path):
        yield directory
        return
    folder = Path(tempfile.mkdtemp(prefix="fetched-", dir=stage))
    try:
        source = directory / str(step)
        for name in source.sizes():
            with contextlib.suppress(FileNotFoundError):  # the check of the files reports it
                (source / name).download(folder / str(step) / name)
        files.tighten(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
