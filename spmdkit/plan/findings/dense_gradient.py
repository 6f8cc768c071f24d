"""`dense-table-gradient`: the gradient of a table is summed over replicas in full, though few of its rows are read.

Dense: 2 (N-1)/N * V * D * 4 bytes a device, of a table [V, D] and N replicas. By rows: (N-1) * rows * (D + 1) * 4, with
the rows that one replica reads (`communication/reducers/sparse_rows.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from spmdkit.foundation.formatting import format_bytes
from spmdkit.foundation.jaxprs import inner_jaxprs, open_jaxpr
from spmdkit.mesh.mesh import REPLICA_AXES, count
from spmdkit.plan.compiled_step import MIN_WIRE_BYTES, CompiledStep
from spmdkit.plan.findings import Finding
from spmdkit.plan.jaxpr_lines import line
from spmdkit.step import trace_context

_SAME = {"convert_element_type", "pvary", "pcast", "copy", "sharding_constraint", "optimization_barrier", "reshard"}


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields one finding for each table that only lookups read."""
    program = step.program
    num = count(program.sizes, REPLICA_AXES) if set(REPLICA_AXES) <= set(program.sizes) else 1
    if num < 2 or not program.reducer.is_sum:
        return
    for leaf, var in zip(program.layout, step.jaxpr.jaxpr.invars, strict=False):
        if not leaf.path.startswith("params") or len(leaf.shape) != 2:
            continue
        readers = [(eqn, inside) for eqn, inside in _readers(step.jaxpr, var) if not _is_update(eqn)]
        if not readers or any(eqn.primitive.name != "gather" for eqn, _ in readers):
            continue
        width = leaf.shape[1]
        shards = {True: 1, False: program.batch_shards}
        rows = sum(math.prod(eqn.outvars[0].aval.shape) // width // shards[inside] for eqn, inside in readers)
        dense = 2 * (num - 1) / num * math.prod(leaf.shape) * 4
        by_rows = (num - 1) * rows * (width + 1) * 4
        if dense < max(MIN_WIRE_BYTES, step.bill.bytes_at_least // 10) or 2 * by_rows > dense:
            continue
        name = leaf.path.removeprefix("params/")
        yield Finding(
            "dense-table-gradient",
            (
                f"the gradient of {leaf.path} {list(leaf.shape)} is summed in full, {format_bytes(dense)} sent a step, "
                f"though a replica reads at most {rows} rows: {format_bytes(by_rows)} by rows"
            ),
            line(readers[0][0]),
            f"reducer: {{sparse_rows: {{leaves: [{name}], rows: {rows}}}}}",
        )


def _is_update(eqn: Any) -> bool:
    scopes = str(eqn.source_info.name_stack)
    return trace_context.OPTIMIZER in scopes or trace_context.GUARD in scopes


def _readers(jaxpr: Any, var: Any, inside: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yields (equation, whether it is inside a shard_map) for what computes with a variable."""
    for eqn in open_jaxpr(jaxpr).eqns:
        positions = [n for n, x in enumerate(eqn.invars) if x is var]
        for body in inner_jaxprs(eqn) if positions else ():
            offset = len(eqn.invars) - len(body.invars)
            for n in positions:
                if 0 <= n - offset < len(body.invars):
                    yield from _readers(body, body.invars[n - offset], inside or eqn.primitive.name == "shard_map")
        if positions and eqn.primitive.name in _SAME:
            yield from _readers(jaxpr, eqn.outvars[0], inside)
        elif positions and not any(True for _ in inner_jaxprs(eqn)):
            yield eqn, inside
