"""`silent-replication`: a large array is replicated over a mesh axis although no rule requests it.

Either a parameter that no rule shards, on a mesh with model axes that could shard it, or an activation that depends on
the batch and is as large on one device as in the full program, because a constraint is missing or names no axis. The
threshold is `layout.replicate_above_bytes`. Weights that fsdp gathers before use are not reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax

from spmdkit.foundation.formatting import format_bytes, shown_axes
from spmdkit.mesh.mesh import MODEL_AXES
from spmdkit.plan.compiled_step import CompiledStep
from spmdkit.plan.findings import Finding
from spmdkit.plan.hlo.source import source_of
from spmdkit.plan.jaxpr_lines import depending, first_use, line

_NO_BUFFER = ("get-tuple-element", "tuple", "bitcast", "while", "constant", "parameter", "copy-start", "copy-done")


def find(step: CompiledStep) -> Iterator[Finding]:
    """Yields the parameters and the activations that every device holds in full."""
    yield from _parameters(step)
    yield from _activations(step)


def _parameters(step: CompiledStep) -> Iterator[Finding]:
    program = step.program
    axes = [a for a in MODEL_AXES if program.sizes[a] > 1 and a not in program.data_axes]
    bound = program.config.layout.replicate_above_bytes
    for leaf, var in zip(program.layout, step.jaxpr.jaxpr.invars, strict=False):
        if not axes or not leaf.path.startswith(("params", "model_state")) or leaf.num_bytes <= bound or len(leaf.spec):
            continue
        if "rule" in leaf.reason or "metadata" in leaf.reason:
            continue
        yield Finding(
            "silent-replication",
            (
                f"{leaf.path} ({format_bytes(leaf.num_bytes)}) is replicated on every device of {shown_axes(axes)}: "
                f"{leaf.reason}"
            ),
            first_use(step.jaxpr.jaxpr, var),
            (
                f"Add a rule that shards it: layout.rules: [['{leaf.path.removeprefix('params/')}', [...]]], or one of "
                "nulls to request the copy."
            ),
        )


def _activations(step: CompiledStep) -> Iterator[Finding]:
    program, module = step.program, step.module
    if program.form == "manual" or program.mesh.size == 1:
        return
    bound = program.config.layout.replicate_above_bytes
    num_state = len(jax.tree.leaves(program.abstract_state))
    jaxpr = step.jaxpr.jaxpr
    whole = set[tuple[str, int]]()
    dependent = list[tuple[Any, Any]]()
    depending(jaxpr, [n >= num_state for n in range(len(jaxpr.invars))], dependent)
    for eqn, out in dependent:
        size = math.prod(getattr(out.aval, "shape", ()))
        if size * getattr(getattr(out.aval, "dtype", None), "itemsize", 4) > bound and (at := line(eqn)):
            whole.add((at, size))
    if not whole:
        return
    weights = {n for leaf in program.layout for n in (math.prod(leaf.shape), math.prod(leaf.shape[1:]))}
    seen: set[str] = set()
    for i in module.unfused():
        if i.opcode in _NO_BUFFER:
            continue
        for shape in i.shapes:
            if shape.bytes <= bound or shape.size in weights or shape.space:
                continue
            source = source_of(module, i)
            if source is None or source in seen or (source, shape.size) not in whole:
                continue
            seen.add(source)
            yield Finding(
                "silent-replication",
                (
                    f"{shape} ({format_bytes(shape.bytes)}) depends on the batch and is as large on each of the "
                    f"{program.mesh.size} devices as in the global program"
                ),
                source,
                'Shard it: sk.shard(x, "batch", ...) on it or on its inputs.',
            )
