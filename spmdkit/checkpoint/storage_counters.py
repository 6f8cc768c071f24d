"""What orbax counts in each process, and all have to count alike: a process that is new in a job has counted nothing
yet."""

from __future__ import annotations

import itertools
import sys
from typing import Any

MODULE = "orbax.checkpoint._src.futures.synchronization"
"""Private in orbax (0.12): the number of an operation is part of the keys at which processes meet."""


def reset() -> None:
    """Lets this process count from the beginning."""
    module: Any = sys.modules.get(MODULE)
    if module is not None:
        generator = module.OperationIdGenerator
        generator._operation_id_counter = itertools.count()
        generator._operation_id = next(generator._operation_id_counter)
