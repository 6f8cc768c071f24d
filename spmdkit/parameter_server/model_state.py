"""The model state of a parameter server: one, on the first server, updated by the steps of all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmdkit.parameter_server.partition import Arrays


def moved(current: Arrays | None, states: Sequence[tuple[Arrays, Arrays]], fresh: bool) -> Arrays:
    """Returns the model state after steps of workers, (old, new) of each.

    For one worker that started from the current state, its result. Otherwise numbers change by the mean of the workers'
    changes, and values that cannot be added (flags) are those of the last.
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
