"""The model state of a parameter server: one, on the first server, moved by the steps of all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmdkit.parameter_server.partition import Arrays


def moved(current: Arrays | None, states: Sequence[tuple[Arrays, Arrays]], fresh: bool) -> Arrays:
    """Returns the model state after steps of workers, (old, new) of each.

    Of one worker that began with the current state: what it made of it. Otherwise numbers move by the mean of what the
    workers added to theirs, and what cannot be added to (flags) is that of the last.
    """
    _, last = states[-1]
    if current is None or (fresh and len(states) == 1):
        return dict(last)

    def moved_leaf(path: str) -> Any:
        if not (np.issubdtype(last[path].dtype, np.number) or last[path].dtype.name == "bfloat16"):
            return last[path]
        total = sum((new[path] - old[path] for old, new in states[1:]), start=states[0][1][path] - states[0][0][path])
        return current[path] + (total / len(states)).astype(total.dtype)

    return {path: moved_leaf(path) for path in last}
