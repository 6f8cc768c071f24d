"""The learning rate of a step, for the log: of `optax.inject_hyperparams`, or of the config's number or schedule.

A schedule is evaluated at the number of updates before the step, which the optimizer counts: skipped steps do not
count. The factor of `reduce_on_plateau` is included. The rate of a complete optimizer in a task is not known, except
with `inject_hyperparams`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
    for scaled in _parts(opt_state, lambda x: isinstance(x, UpdateScale | optax.contrib.ReduceLROnPlateauState)):
        rate *= _first(scaled.scale)
    return rate


class UpdateScale(NamedTuple):
    """State of `scaled_updates`. `scale`: float32[], the factor of the updates."""

    scale: jax.Array


def scaled_updates() -> optax.GradientTransformation:
    """Returns a transformation that multiplies the updates by its state, initially 1, which the host replaces."""
    update: Any = lambda updates, state, params=None: (
        jax.tree.map(lambda u: (state.scale * u).astype(u.dtype), updates),
        state,
    )
    return optax.GradientTransformation(lambda params: UpdateScale(jnp.float32(1)), update)


def with_scale(opt_state: Any, scale: float) -> Any:
    """Returns the optimizer's state with this factor in every `scaled_updates`."""
    is_scale: Callable[[Any], bool] = lambda x: isinstance(x, UpdateScale)
    placed: Callable[[Any], Any] = lambda x: UpdateScale(jax.device_put(np.full(x.shape, scale, x.dtype), x.sharding))
    return jax.tree.map(lambda x: placed(x.scale) if is_scale(x) else x, opt_state, is_leaf=is_scale)


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
