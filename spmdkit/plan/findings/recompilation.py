"""`recompilation-risk`: a compiled step is valid for only one value or one Python type.

A concrete array in the closure of the user's function becomes a constant of the program: another value triggers another
compilation, and every device holds the full array. A weakly typed leaf (a Python number) is strongly typed after one
step: the second call of a step that is compiled on demand compiles again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spmdkit.foundation.formatting import format_bytes
from spmdkit.foundation.jaxprs import equations
from spmdkit.foundation.trees import describe, named_leaves
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding
from spmdkit.plan.jaxpr_lines import first_use, line

MIN_BYTES = 2**16


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields a finding for each large constant of the program, and one for weakly typed leaves of the state."""
    closed = step.jaxpr
    for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if getattr(value, "nbytes", 0) >= MIN_BYTES:
            yield _baked(value, first_use(closed.jaxpr, var))
    literals = ((getattr(x, "val", None), eqn) for eqn in equations(closed) for x in eqn.invars)
    seen = set[int]()
    for value, eqn in literals:
        if getattr(value, "nbytes", 0) >= MIN_BYTES and id(value) not in seen:
            seen.add(id(value))
            yield _baked(value, line(eqn))
    leaves = named_leaves(step.program._abstract_state)
    if weak := [path for path, leaf in leaves if getattr(leaf, "weak_type", False)]:
        yield Finding(
            "recompilation-risk",
            f"{', '.join(weak[:4])} of the state began as a Python number (weak type); a step gives back a strong type",
            None,
            "Make it with jnp.asarray(value, dtype) in init.",
            severity="note",
        )


def _baked(value: Any, source: str | None) -> Finding:
    return Finding(
        "recompilation-risk",
        (
            f"{describe(value)} ({format_bytes(value.nbytes)}) is a constant of the program: every device "
            "holds all of it, and another value is another compilation"
        ),
        source,
        "Pass it as an argument of the step: in the batch, in the parameters, or as model state (sk.Variables).",
    )
