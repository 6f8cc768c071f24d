"""`recompilation-risk`: something makes one compiled step the program of one value or one Python type only.

A concrete array that the user's function closes over is baked into the program: another value is another compilation,
and every device holds all of it. A weakly typed leaf (a Python number) comes back from a step strongly typed: a second
call of a step that is compiled on demand compiles again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from spmdkit.foundation.formatting import format_bytes
from spmdkit.foundation.jaxprs import equations
from spmdkit.foundation.trees import describe, named_leaves
from spmdkit.plan.finding import Finding
from spmdkit.plan.findings import CompiledStep
from spmdkit.plan.jaxpr_lines import first_use, line

MIN_BYTES = 2**16


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields a finding for each large constant of the program, and one for weakly typed leaves of the state."""
    closed = step.jaxpr
    for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        size = int(np.prod(np.shape(value), dtype=np.int64)) * getattr(getattr(value, "dtype", None), "itemsize", 4)
        if size >= MIN_BYTES:
            yield _baked(describe(value), size, first_use(closed.jaxpr, var))
    for value, source in _literals(closed.jaxpr):
        yield _baked(describe(value), value.nbytes, source)
    leaves = named_leaves(step.program._abstract_state)
    if weak := [path for path, leaf in leaves if getattr(leaf, "weak_type", False)]:
        yield Finding(
            "note",
            "recompilation-risk",
            f"{', '.join(weak[:4])} of the state began as a Python number (weak type); a step gives back a strong type",
            None,
            "Make it with jnp.asarray(value, dtype) in init.",
        )


def _baked(what: str, size: int, source: str | None) -> Finding:
    return Finding(
        "warning",
        "recompilation-risk",
        (
            f"{what} ({format_bytes(size)}) is a constant of the program: every device holds all of it, and another "
            "value is another compilation"
        ),
        source,
        "Hand it over: in the batch, in the parameters, or as model state (sk.Variables).",
    )


def _literals(jaxpr: Any) -> Iterator[tuple[Any, str | None]]:
    """Yields the large concrete arrays that stand in equations, with the user's line."""
    seen: set[int] = set()
    for eqn in equations(jaxpr):
        for x in eqn.invars:
            value = getattr(x, "val", None)
            if isinstance(value, (np.ndarray, jax.Array)) and value.nbytes >= MIN_BYTES and id(value) not in seen:
                seen.add(id(value))
                yield value, line(eqn)
