"""Damages the newest checkpoint while no process of the run is alive: truncates a file, or flips one bit in it."""

from __future__ import annotations

import os
import random
from pathlib import Path

from spmdkit.checkpoint.record import TEMPORARY_MARK
from spmdkit.foundation.constants import is_step_name


def newest(run_dir: Path) -> int:
    """Returns the newest committed step of a run; 0 if there is none."""
    return max((int(p.name) for p in (run_dir / "checkpoints").glob("*") if is_step_name(p.name)), default=0)


def unfinished(run_dir: Path) -> str:
    """Returns the name of an unfinished save; empty if there is none."""
    return max((path.name for path in (run_dir / "checkpoints").glob(f"*{TEMPORARY_MARK}")), default="")


def damage(run_dir: Path, kind: str, rng: random.Random) -> str:
    """Damages the largest file of the newest checkpoint and returns its path; empty if there is none.

    `kind`: "truncate" halves its length, "corrupt" flips one bit anywhere in it.
    """
    folder = run_dir / "checkpoints" / str(newest(run_dir))
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()] if folder.is_dir() else []
    path = max(files, key=lambda p: (p.stat().st_size, str(p)), default=None)
    if path is None or not path.stat().st_size:
        return ""
    size = path.stat().st_size
    if kind == "truncate":
        os.truncate(path, size // 2)
    else:
        with path.open("r+b") as file:
            at = rng.randrange(size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    return str(path.relative_to(run_dir))
