"""`silent-replication`: a large array is replicated over a mesh axis although no rule requests it.

Either a parameter that no rule shards, on a mesh with model axes that could shard it, or an activation that depends on
the batch and is as large on one device as in the full program, because a constraint is missing or names no axis. The
threshold is `layout.replicate_above_bytes`. Weights that fsdp gathers before use, and gradients of weights, are not
reported.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
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
    if program.form == "manual" or program.mesh.size == 1 or step.is_substitute:
        return
    bound = program.config.layout.replicate_above_bytes
    num_state = len(jax.tree.leaves(program.abstract_state))
    jaxpr = step.jaxpr.jaxpr
    weights = [dims for leaf in program.layout for dims in (leaf.shape, leaf.shape[1:])]
    whole = defaultdict[tuple[str, int], set[tuple[int, ...]]](set)
    dependent = list[tuple[Any, Any]]()
    depending(jaxpr, [n >= num_state for n in range(len(jaxpr.invars))], dependent)
    for eqn, out in dependent:
        dims = tuple(getattr(out.aval, "shape", ()))
        size = math.prod(dims)
        is_large = size * getattr(getattr(out.aval, "dtype", None), "itemsize", 4) > bound
        is_of_weight = is_large and any(_is_of_weight(dims, weight, program.batch_shards) for weight in weights)
        if is_large and not is_of_weight and (at := line(eqn)):
            whole[at, size].add(dims)
    seen: set[str] = set()
    for i in module.unfused() if whole else ():
        if i.opcode in _NO_BUFFER:
            continue
        for shape in i.shapes:
            if shape.bytes <= bound or shape.space:
                continue
            source = source_of(module, i)
            if source is None or source in seen:
                continue
            if not any(_is_merged(shape.dims, dims) for dims in whole.get((source, shape.size), ())):
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


def _is_of_weight(dims: Sequence[int], weight: Sequence[int], num_replicas: int) -> bool:
    """Returns whether an array has the dims of a weight, in any order, and otherwise only dims of replicas."""
    more, less = Counter(dims), Counter(weight)
    return less <= more and num_replicas % math.prod((more - less).elements()) == 0


def _is_merged(dims: Sequence[int], whole: Sequence[int]) -> bool:
    """Returns whether an array has the dims of `whole` in any order, some of them merged into one."""
    dims, whole = [n for n in dims if n > 1], [n for n in whole if n > 1]
    if not dims:
        return not whole
    choices = itertools.chain.from_iterable(
        itertools.combinations(range(len(whole)), num) for num in range(1, len(whole) + 1)
    )
    return any(
        math.prod(whole[n] for n in chosen) == dims[0]
        and _is_merged(dims[1:], [n for i, n in enumerate(whole) if i not in chosen])
        for chosen in choices
    )
