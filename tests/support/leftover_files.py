"""Unexpected files of a job: in its working folder, in the folder for temporary files, and partial files in both."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

HALF_WRITTEN = (".partial", ".orbax-checkpoint-tmp", ".tmp")


def leftover_files(folder: Path, temporary: Path, known: Collection[str]) -> list[str]:
    """Returns unexpected paths. `known`: expected names in `folder`. `temporary` was empty before the job."""
    beside = [path for path in folder.iterdir() if path.name not in known and path != temporary]
    half = [path for path in folder.rglob("*") if path.name.endswith(HALF_WRITTEN)]
    return sorted({str(path) for path in (*beside, *half, *temporary.rglob("*"))})
