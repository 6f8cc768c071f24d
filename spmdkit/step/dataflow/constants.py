"""Finds constants of a loss that differ between two traces of it: random numbers of numpy, the time, a counter.

A compiled step contains such a number as a constant. It is the same in every step and on every replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core
import numpy as np

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation import jaxprs
from spmdkit.foundation.trees import is_key


def check_constants(first: jax.extend.core.ClosedJaxpr, second: jax.extend.core.ClosedJaxpr) -> None:
    """Raises ConfigError if a constant differs between two traces of one loss with equal inputs."""
    pairs = zip(_constants(first), _constants(second), strict=False)
    for (eqn, position, one), (_, other_position, other) in pairs:
        if position != other_position:  # the traces have other operations
            return
        if not _equal(one, other):
            line = None if eqn is None else compat.user_line(eqn)
            found = f"an array of shape {np.shape(one)}" if np.ndim(one) else f"{one}, then {other}"
            raise ConfigError(
                f"{f'{line}: ' if line else ''}loss_fn uses a number that is made while it is traced: {found}. It "
                "becomes a constant of the compiled step, the same in every step and on every replica. Draw random "
                "numbers with jax.random from the key of the loss, or pass the number in the batch."
            )


def _constants(closed: jax.extend.core.ClosedJaxpr) -> Iterator[tuple[Any, tuple[int, str, int], Any]]:
    """Yields (the first equation that uses it, its position, value) of each constant of a jaxpr."""
    arrays = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for number, eqn in enumerate(jaxprs.equations(closed)):
        for index, var in enumerate(eqn.invars):
            if isinstance(var, jax.extend.core.Literal):
                yield eqn, (number, eqn.primitive.name, index), var.val
            elif var in arrays:
                yield eqn, (number, eqn.primitive.name, index), arrays.pop(var)
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                for const in item.consts if isinstance(item, jax.extend.core.ClosedJaxpr) else ():
                    yield eqn, (number, eqn.primitive.name, -1), const


def _equal(first: Any, second: Any) -> bool:
    if first is second or isinstance(first, jax.core.Tracer) or isinstance(second, jax.core.Tracer):
        return True
    if is_key(first):
        return True
    return bool(np.array_equal(np.asarray(first), np.asarray(second), equal_nan=np.asarray(first).dtype.kind == "f"))
