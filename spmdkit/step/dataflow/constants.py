"""Finds constants of a loss or step that differ between two traces of it: random numbers of numpy, the time, a counter.

A compiled step contains such a number as a constant. It is the same in every step and on every replica.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core
import numpy as np

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation import jaxprs
from spmdkit.foundation.trees import is_key

_NUMBERS, _SEQUENCES = (int, float), (tuple, list)


def check_constants(
    first: jax.extend.core.ClosedJaxpr, second: jax.extend.core.ClosedJaxpr, what: str = "loss_fn"
) -> None:
    """Raises ConfigError if an operation or a constant differs between two traces of one function with equal inputs.

    Args:
        what: name of the function.
    """
    pairs = itertools.zip_longest(_parts(first), _parts(second), fillvalue=(None, "no operation"))
    for (eqn, one), (other_eqn, other) in pairs:
        if not _equal(one, other):
            line = next(compat.user_line(e) for e in (eqn, other_eqn) if e is not None)
            found = f"an array of shape {np.shape(one)}" if np.ndim(one) else f"{one}, then {other}"
            raise ConfigError(
                f"{f'{line}: ' if line else ''}{what} uses a number that is made while it is traced: {found}. It "
                "is a constant of the compiled step, or selects its operations, and stays the same in every step and "
                "on every replica. Draw random numbers with jax.random from the key it receives (jnp.where and "
                "lax.cond select by them), or pass the number in the batch."
            )


def _parts(closed: jax.extend.core.ClosedJaxpr) -> Iterator[tuple[Any, Any]]:
    """Yields (equation, value) of each operation that a result depends on: its name, the numbers among
    its parameters, and its constants."""
    arrays = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    needed = jaxprs.needed_eqns(closed.jaxpr.eqns, closed.jaxpr.outvars)
    for eqn in jaxprs.equations(closed.jaxpr.replace(eqns=needed)):
        yield eqn, eqn.primitive.name
        for var in eqn.invars:
            if isinstance(var, jax.extend.core.Literal):
                yield eqn, var.val
            elif var in arrays:
                yield _first_use(eqn, var), arrays.pop(var)
        for value in eqn.params.values():
            for item in value if isinstance(value, _SEQUENCES) else (value,):
                if isinstance(item, _NUMBERS):
                    yield eqn, item
                for const in item.consts if isinstance(item, jax.extend.core.ClosedJaxpr) else ():
                    yield eqn, const


def _first_use(eqn: Any, var: Any) -> Any:
    """Returns the equation that uses a value first: one in the body of a `shard_map` in place of the call."""
    for inner in jaxprs.inner_jaxprs(eqn):
        if len(inner.invars) == len(eqn.invars):
            within = inner.invars[eqn.invars.index(var)]
            return next((_first_use(e, within) for e in inner.eqns if within in e.invars), eqn)
    return eqn


def _equal(first: Any, second: Any) -> bool:
    if first is second or is_key(first):
        return True
    return bool(np.array_equal(np.asarray(first), np.asarray(second), equal_nan=np.asarray(first).dtype.kind == "f"))
