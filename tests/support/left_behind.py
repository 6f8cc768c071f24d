"""What a job has left on the disk beside what it was to make: in its working folder, in the folder for temporary files,
and half written below both."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

HALF_WRITTEN = (".partial", ".orbax-checkpoint-tmp", ".tmp")


def left_behind(folder: Path, temporary: Path, known: Collection[str]) -> list[str]:
    """Returns the paths that nobody asked for; `known`: names in `folder` that belong there. `temporary` was empty
    before."""
    beside = [path for path in folder.iterdir() if path.name not in known and path != temporary]
    half = [path for path in folder.rglob("*") if path.name.endswith(HALF_WRITTEN)]
    return sorted({str(path) for path in (*beside, *half, *temporary.rglob("*"))})
