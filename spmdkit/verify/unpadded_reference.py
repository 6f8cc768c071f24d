"""`Unpadded`: the one-device program that runs a short batch at its actual size, without padding.

It exposes padding rows that count as examples, since the reference has no padding rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from spmdkit.config import replace_keys
from spmdkit.program.program import Program
from spmdkit.step.state import TrainState
from spmdkit.step.step import Batch


class Unpadded:
    """A one-device program without microbatches. Its step receives only the real rows of a batch."""

    def __init__(self, padded: Program):
        self._padded, self._by_size = padded, dict[int, Program]()

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute that does not depend on the batch: `init`, `eval`, `config`, ..."""
        return getattr(self._padded, name)

    def batches(self, stop: int) -> Iterator[tuple[int, Batch]]:
        """Yields `(step, batch)` with the real rows only."""
        for step, batch in self._padded.batches(stop=stop):
            examples, mask = jax.device_get((batch.examples, batch.mask))
            num = int(mask.sum())
            yield step, self._program_of(num).put(jax.tree.map(lambda x, real=mask: x[real], examples))

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state after one step, and its metrics."""
        return self._program_of(int(np.shape(jax.tree.leaves(batch.examples)[0])[0])).step(state, batch)

    def _program_of(self, size: int) -> Program:
        if size not in self._by_size:
            config = replace_keys(self._padded.config, {"batch_size": size, "data.drop_remainder": True})
            # The optimizer object is shared: a state is valid only for the optimizer that created it.
            task = dataclasses.replace(self._padded.task, eval_data=None)
            self._by_size[size] = Program(config, task, jax.devices()[:1])
        return self._by_size[size]
