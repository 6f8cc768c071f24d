"""Damages the newest checkpoint while no process of the run is alive: truncates a file, or flips one bit in it."""

from __future__ import annotations

import random

from spmdkit.checkpoint import location
from spmdkit.checkpoint.location import Location
from spmdkit.checkpoint.record import TEMPORARY_MARK, committed_steps


def newest(checkpoints: Location) -> int:
    """Returns the newest committed step in a folder of checkpoints; 0 if there is none."""
    return max(committed_steps(checkpoints), default=0)


def unfinished(checkpoints: Location) -> str:
    """Returns the name of an unfinished save; empty if there is none, or in a bucket."""
    return max((name for name in location.names(checkpoints) if name.endswith(TEMPORARY_MARK)), default="")


def damage(checkpoints: Location, kind: str, rng: random.Random) -> str:
    """Damages the largest file of the newest checkpoint and returns its path in the folder; empty if there is none.

    `kind`: "truncate" halves its length, "corrupt" flips one bit anywhere in it.
    """
    folder = checkpoints / str(newest(checkpoints))
    size, name = max(((size, name) for name, size in location.sizes(folder).items()), default=(0, ""))
    if not size:
        return ""
    path = folder / name
    content = bytearray(path.read_bytes())
    if kind == "truncate":
        del content[size // 2 :]
    else:
        content[rng.randrange(size)] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(content))
    return f"{folder.name}/{name}"
