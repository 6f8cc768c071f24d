"""`quadratic-scores`: attention scores [..., T, S] are arrays in memory, instead of blocks in a kernel.

Read from the jaxpr: a product that depends on the batch, with batch dims (examples, heads). Its result is as long along
one free dim as along the other, and longer than twice the contracted dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax

from spmdkit.foundation.formatting import format_bytes
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding
from spmdkit.plan.hlo.source import source_of
from spmdkit.plan.jaxpr_lines import depending, line

MIN_LENGTH = 512
MIN_BYTES = 2**24


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields one finding for each line with scores in the memory of a device."""
    num_state = len(jax.tree.leaves(step.program.abstract_state))
    jaxpr, dependent = step.jaxpr.jaxpr, list[tuple[Any, Any]]()
    depending(jaxpr, [n >= num_state for n in range(len(jaxpr.invars))], dependent, into_manual=True)
    lines = {line(eqn): dims for eqn, _ in dependent if (dims := _scores(eqn))}
    found: dict[str, tuple[int, str]] = {}
    for i in step.module.unfused() if lines else ():
        for shape in i.shapes:
            if shape.bytes < MIN_BYTES or shape.space or not (source := source_of(step.module, i)):
                continue
            if shape.dims.count(lines.get(source, -1)) > 1 and shape.bytes > found.get(source, (0, ""))[0]:
                found[source] = shape.bytes, str(shape)
    for source, (num_bytes, array) in found.items():
        if not source.startswith("spmdkit/"):
            yield Finding(
                "quadratic-scores",
                f"{array} ({format_bytes(num_bytes)} of each device) are scores of every position with every position",
                source,
                "sk.attention(q, k, v) computes them in blocks; without spmdkit, jax.nn.dot_product_attention on GPU.",
            )


def _scores(eqn: Any) -> int | None:
    """Returns T if an equation computes scores [..., T, T]."""
    if eqn.primitive.name != "dot_general":
        return None
    contracted, batch = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[n] for n in contracted[0])
    first, second = (
        max((n for d, n in enumerate(x.aval.shape) if d not in (*of, *along)), default=0)
        for x, of, along in zip(eqn.invars, contracted, batch, strict=True)
    )
    return int(first) if batch[0] and first == second >= max(MIN_LENGTH, 2 * depth) else None
