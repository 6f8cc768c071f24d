"""The cause of a collective: the part of the parallelism strategy that needs it.

Determined from, in this order: the innermost scope in its name (`spmdkit/reduce`, or the scope of an op;
`spmdkit.step.trace_context`), the arrays (parameters, arrays of a parameter's size, scalars), and the axes with the op.
A collective that matches no rule is `other`.

    metrics               an all_reduce of scalars: losses, counts, norms
    gradient reduction    an all_reduce of parameter-sized arrays outside the forward pass
    gradient scatter      a reduce_scatter of such arrays (not over tensor), or over fsdp in the backward pass
    parameter gather      an all_gather (or an all_reduce in the forward pass) of data that originates in a parameter
    update gather         an all_gather outside the forward and backward pass: new parameters of ZeRO 1 and 2
    context, expert, pipeline, tensor    by the axis, for arrays that are not parameters
    activation            any other collective over model axes in the forward or backward pass
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from spmdkit.mesh.mesh import spec_axes
from spmdkit.plan.hlo.collectives import HloCollective
from spmdkit.plan.hlo.loops import Visit
from spmdkit.plan.hlo.text import SAME, Computation, Instruction, Module
from spmdkit.step import trace_context

if TYPE_CHECKING:
    from spmdkit.program.program import Program

CAUSES = (
    "gradient reduction", "agreement of groups", "gradient scatter", "parameter gather", "update gather",
    "context ring", "context exchange", "expert dispatch", "pipeline transfer", "tensor activation", "activation",
    "metrics", "other",
)  # fmt: skip
OF_DATA_PARALLELISM = frozenset({"gradient reduction", "gradient scatter", "parameter gather", "update gather"})
"""Causes of data parallelism and ZeRO: their bytes do not depend on the batch."""

_OF_OPS = {
    trace_context.RING: ("context", "context ring"),
    trace_context.ALL_TO_ALL: ("context", "context exchange"),
    trace_context.MOE: ("expert", "expert dispatch"),
    trace_context.PIPELINE: ("pipeline", "pipeline transfer"),
    trace_context.TENSOR: ("tensor", "tensor activation"),
    trace_context.VOCAB: ("tensor", "tensor activation"),
}
"""Scope of an op -> (mesh axis of the op, cause)."""

_SCOPE = re.compile(r"spmdkit/\w+")
_JOINED = re.compile(r"(?:^|/)\(")


class Leaf(NamedTuple):
    """A parameter on one device: `sizes` are its numbers of elements, sharded over all, some or none of its axes and
    fsdp. `name` is that of the program's argument in a step that does not use spmdkit."""

    path: str
    sizes: frozenset[int]
    name: str = ""


def leaves_of(program: Program) -> tuple[Leaf, ...]:
    """Returns the parameters of a program. For a leaf of stacked layers, `sizes` includes the size of one layer."""
    leaves = []
    for p in program.layout:
        if not p.path.startswith("params"):
            continue
        full = math.prod(p.shape)
        sizes = {full}
        for axis in {*spec_axes(p.spec), "fsdp"}:
            sizes |= {size // program.sizes[axis] for size in sizes}
        layers = {n // p.shape[0] for n in sizes if len(p.shape) > 1 and p.shape[0]}
        leaves.append(Leaf(p.path, frozenset((sizes | layers) - {0}), program.argument_names.get(p.path, "")))
    return tuple(leaves)


def strategy_of(module: Module, found: HloCollective, visit: Visit, leaves: Sequence[Leaf]) -> str:
    """Returns one of `CAUSES`."""
    axes, op, name = set(found.spans), found.emulated_op or found.op, found.op_name
    if op == "all_reduce" and all(shape.size == 1 for shape in found.shapes):
        return "metrics"
    scopes = _SCOPE.findall(first_path(name))[::-1]  # innermost first
    backward = "transpose(" in name
    forward = "jvp(" in name and not backward
    if trace_context.SYNC in scopes[:1]:
        return "agreement of groups"
    if trace_context.REDUCE in scopes[:1]:
        return "gradient scatter" if found.op == "reduce_scatter" else "gradient reduction"
    like_parameters = _like_parameters(found, leaves)
    if op == "all_reduce" and like_parameters and (not forward or "pipeline" in axes):  # manual backward pass in 1f1b
        return "gradient reduction"
    for axis, cause in (_OF_OPS[s] for s in scopes if s in _OF_OPS):
        if axis in axes:
            return cause
    if (op == "all_gather" or forward) and _is_parameter(origin_of(module, visit) or "", leaves):
        return "parameter gather"
    if op == "all_gather" and not forward and not backward and like_parameters:
        return "update gather"
    if op == "reduce_scatter" and "tensor" not in axes and (like_parameters or (backward and axes == {"fsdp"})):
        return "gradient scatter"
    if op == "all_gather" and like_parameters and axes <= {"fsdp"}:
        return "parameter gather"
    if "pipeline" in axes:
        return "pipeline transfer"
    if "expert" in axes:
        return "expert dispatch"
    if "context" in axes and op != "all_reduce":
        return "context ring" if op == "collective_permute" else "context exchange"
    if "tensor" in axes:
        return "tensor activation"
    return "activation" if (forward or backward) and axes - {"replica", "data"} else "other"


def first_path(name: str) -> str:
    """Returns the first path in the name of an operation. XLA names merged operations `jit(f)/a/(b/add:c/mul)`."""
    match = _JOINED.search(name)
    if match is None:
        return name
    before, depth, end = name[: match.end() - 1], 0, match.end()
    while end < len(name) and (depth or name[end] not in ":)"):
        depth += {"(": 1, ")": -1}.get(name[end], 0)
        end += 1
    return first_path(before + name[match.end() : end])


def _is_parameter(argument: str, leaves: Sequence[Leaf]) -> bool:
    own = argument.replace("\\", "")
    return ".params" in own.split("[")[0] or any(own == leaf.name != "" for leaf in leaves)


def _like_parameters(found: HloCollective, leaves: Sequence[Leaf]) -> bool:
    """Returns whether most of the bytes are in arrays with as many elements as a parameter (or as one layer of it)."""
    known = {size for leaf in leaves for size in leaf.sizes}
    factor = found.group_size if found.op == "all_gather" else 1
    like = sum(s.bytes for s in found.shapes if s.size * factor in known or s.size in known)
    return 2 * like > sum(s.bytes for s in found.shapes)


_MOVES = {
    *SAME, "dynamic-slice", "slice", "get-tuple-element", "opt-barrier", "broadcast", "dynamic-update-slice", "pad",
}  # fmt: skip


def origin_of(module: Module, visit: Visit, steps: int = 80) -> str | None:
    """Returns the name of the program argument (`state.params['w']`) that reaches a collective as its largest operand,
    moved or cast only; None for a computed operand.
    """
    i: Instruction | None = visit.instruction
    site, index = visit.site, None
    for step in range(steps):
        if i is None:
            return None
        computation = module.around(i)
        if i.opcode == "parameter":
            if site is None:
                return i.op_name
            caller, site = site.caller, site.outer
            number = int(i.text) if caller.opcode in ("fusion", "call", "async-start") else 0
            i = module.around(caller).operand(caller, number)
        elif i.opcode == "tuple" and index is not None:
            i, index = computation.operand(i, index), None
        elif i.opcode in ("while", "get-tuple-element"):
            index = int(i.attribute("index") or 0) if i.opcode == "get-tuple-element" else index
            i = computation.operand(i)
        elif step == 0 or i.opcode in _MOVES or (i.opcode == "fusion" and _only_moves(module.fused(i))):
            operands = computation.operands(i)
            useful = [o for o in operands if o.opcode not in ("constant", "broadcast")] or operands
            i = max(useful, key=lambda o: o.bytes, default=None)
        else:
            return None
    return None


def _only_moves(fused: Computation) -> bool:
    allowed = _MOVES | {"parameter", "constant", "tuple", "compare", "select", "add", "iota", "and", "clamp"}
    return all(
        j.opcode in allowed and (j.opcode not in ("add", "select", "compare", "clamp") or j.bytes <= 8)
        for j in fused.instructions
    )
