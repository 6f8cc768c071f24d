"""`host-callback`: the step calls a Python function on the host, and the devices wait for it in every step."""

from __future__ import annotations

import math
from collections.abc import Iterator

from spmdkit.foundation.formatting import format_bytes
from spmdkit.foundation.jaxprs import equations
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding
from spmdkit.plan.jaxpr_lines import line

_CALLBACKS = {"pure_callback", "io_callback", "debug_callback", "debug_print"}


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields one finding for each line with a callback; spmdkit's own are not reported."""
    for eqn in equations(step.jaxpr):
        at = line(eqn)
        if eqn.primitive.name not in _CALLBACKS or at is None or at.startswith("spmdkit/"):
            continue
        arrays = [x.aval for x in (*eqn.invars, *eqn.outvars) if hasattr(x.aval, "shape")]
        num_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
        yield Finding(
            "host-callback",
            (
                f"{eqn.primitive.name} runs Python on the host in every step and moves {format_bytes(num_bytes)} "
                "between device and host"
            ),
            at,
            "Remove it from the step: return the value as a metric, or use a hook; for debugging, guard it by a flag.",
        )
