"""The learning rate of a step, for the log: of `optax.inject_hyperparams`, or of the config's number or schedule.

A schedule is evaluated at the number of updates before the step, which the optimizer counts: skipped steps do not
count. The factor of `reduce_on_plateau` is included. The rate of a complete optimizer in a task is not known, except
with `inject_hyperparams`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

from spmdkit.config import Config
from spmdkit.config.optimizer import build_schedule


def learning_rate(config: Config, opt_state: Any, step: int) -> float | None:
    """Returns the learning rate of the update in `step`; None if it is not known.

    Args:
        opt_state: the optimizer's state after the step. Its scalars are read from the devices.
    """
    injected: dict[str, Any] = next((x.hyperparams for x in _parts(opt_state, lambda x: hasattr(x, "hyperparams"))), {})
    if "learning_rate" in injected:
        rate = _first(injected["learning_rate"])
    else:
        source = config.learning_rate
        if source is None and config.optimizer is not None:
            source = config.optimizer.get("learning_rate")
        if source is None:
            return None
        rate = float(source) if isinstance(source, int | float) else _of_schedule(source, opt_state, step)
    for plateau in _parts(opt_state, lambda x: isinstance(x, optax.contrib.ReduceLROnPlateauState)):
        rate *= _first(plateau.scale)
    return rate


def _of_schedule(source: Any, opt_state: Any, step: int) -> float:
    counts = [_first(x.count) for x in _parts(opt_state, lambda x: isinstance(x, optax.ScaleByScheduleState))]
    before = max(int(counts[0]) - 1, 0) if counts else step - 1
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies integers with floats
        return float(_compiled(json.dumps(source))(np.int32(before)))


@functools.cache
def _compiled(source: str) -> Any:
    return jax.jit(build_schedule(json.loads(source)))


def _parts(opt_state: Any, is_part: Callable[[Any], bool]) -> Iterator[Any]:
    """Yields the parts of an optimizer's state of one kind, the outermost."""
    return filter(is_part, jax.tree.leaves(opt_state, is_leaf=is_part))


def _first(x: Any) -> float:
    """Returns a scalar, or that of the first group of this process."""
    local = x.addressable_data(0) if isinstance(x, jax.Array) else x
    return float(np.ravel(local)[0])
