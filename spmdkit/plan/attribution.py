"""The cause of a collective: the part of the parallelism strategy that needs it.

Determined from, in this order: the innermost scope in its name (`spmdkit/reduce`, or the scope of an op;
`spmdkit.step.trace_context`), the values (where the operand comes from, where the result goes), and the axes with the
op. Sizes of arrays do not matter. A collective that matches no rule is `other`.

    metrics               an all_reduce of scalars, or in the forward pass with a result that the step returns
    optimizer             a sum in the optimizer's update: norms, statistics
    gradient reduction    an all_reduce with a result that the update receives without further products
    gradient scatter      a reduce_scatter of this kind, or over fsdp in the backward pass
    parameter gather      an all_gather (or an all_reduce in the forward pass) of data that originates in a parameter;
                          over fsdp alone also of computed floats
    update gather         an all_gather in or after the update: new parameters of ZeRO 1 and 2
    context, expert, pipeline, tensor    by the axis, for all other arrays
    activation            any other collective over model axes in the forward or backward pass
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from spmdkit.plan.hlo.collectives import HloCollective
from spmdkit.plan.hlo.loops import CALLS, Site, Visit
from spmdkit.plan.hlo.text import SAME, Computation, Instruction, Module
from spmdkit.step import trace_context

if TYPE_CHECKING:
    from spmdkit.program.program import Program

CAUSES = (
    "gradient reduction", "agreement of groups", "gradient scatter", "parameter gather", "update gather",
    "context ring", "context exchange", "expert dispatch", "pipeline transfer", "tensor activation", "activation",
    "optimizer", "metrics", "other",
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

_VOCAB = trace_context.VOCAB
_SCOPE = re.compile(r"spmdkit/\w+")
_JOINED = re.compile(r"(?:^|/)\(")


class Leaf(NamedTuple):
    """A parameter. `name` is that of the program's argument in a step that does not use spmdkit."""

    path: str
    name: str = ""


def leaves_of(program: Program) -> tuple[Leaf, ...]:
    """Returns the parameters of a program."""
    parameters = (p for p in program.layout if p.path.startswith("params"))
    return tuple(Leaf(p.path, program.argument_names.get(p.path, "")) for p in parameters)


def strategy_of(module: Module, found: HloCollective, visit: Visit, leaves: Sequence[Leaf]) -> str:
    """Returns one of `CAUSES`."""
    axes, op, name = set(found.spans), found.emulated_op or found.op, found.op_name
    if op == "all_reduce" and all(shape.size == 1 for shape in found.shapes):
        return "metrics"
    scopes = _SCOPE.findall(first_path(name))[::-1]  # innermost first
    is_of_optimizer = trace_context.OPTIMIZER in scopes[:1]
    backward = "transpose(" in name
    forward = "jvp(" in name and not backward
    if trace_context.SYNC in scopes[:1]:
        return "agreement of groups"
    all_scopes = _SCOPE.findall(name)  # also of the operations that XLA merged into it
    if trace_context.REDUCE in scopes[:1] or (is_of_optimizer and trace_context.REDUCE in all_scopes):
        return "gradient scatter" if found.op == "reduce_scatter" else "gradient reduction"
    if is_of_optimizer:
        return "update gather" if op == "all_gather" else "optimizer"
    destination = destination_of(module, visit)
    is_gradient = destination == "update" or (destination == "outside" and backward)
    if is_gradient and op in ("all_reduce", "reduce_scatter"):
        return "gradient scatter" if op == "reduce_scatter" else "gradient reduction"
    if destination == "output" and op == "all_reduce" and forward:
        return "metrics"
    for axis, cause in (_OF_OPS[s] for s in scopes if s in _OF_OPS):
        if axis in axes:
            return cause
    origin = origin_of(module, visit)
    if (op == "all_gather" or forward) and _is_parameter(origin or "", leaves):
        return "parameter gather"
    if op == "all_gather" and not forward and not backward and destination == "output":
        return "update gather"
    if op == "reduce_scatter" and backward and axes == {"fsdp"}:
        return "gradient scatter"
    if op == "all_gather" and axes == {"fsdp"} and origin is None and _is_float(found) and scopes[:1] != [_VOCAB]:
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


def _is_float(found: HloCollective) -> bool:
    return found.dtype.startswith(("f", "bf"))


_MOVES = {
    *SAME, "dynamic-slice", "slice", "get-tuple-element", "opt-barrier", "broadcast", "dynamic-update-slice", "pad",
}  # fmt: skip


def origin_of(module: Module, visit: Visit) -> str | None:
    """Returns the name of the program argument (`state.params['w']`) that reaches a collective as its largest operand,
    moved or cast only; None for a computed operand.
    """
    i: Instruction | None = visit.instruction
    site, index = visit.site, None
    for step in range(80):
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


_COMPUTES = {
    "dot", "convolution", "custom-call", "reduce", "reduce-window", "scatter", "gather", "sort", "while", "conditional",
}  # fmt: skip
"""Operations that compute with several elements; all others only move or combine arrays element by element."""


def destination_of(module: Module, visit: Visit) -> str:
    """Returns where the result of a collective goes without further products and sums.

    `update`: to the reduction over replicas or the optimizer, by their scopes. `outside`: to an operation outside of
    the forward and backward pass. `output`: the step returns it. Empty: a pass computes with it.
    """
    waiting: list[tuple[Instruction, Site | None, int | None]] = [(visit.instruction, visit.site, None)]
    seen, reached = set[Any](), set[str]()
    while waiting:
        i, site, index = waiting.pop()
        if (id(i), id(site), index) in seen:
            continue
        seen.add((id(i), id(site), index))
        if i.is_root:
            if site is None:
                reached.add("output")
            else:
                waiting.append((site.caller, site.outer, index))
        for user in module.around(i).users[i.name]:
            if user.opcode == "get-tuple-element" and index not in (None, int(user.attribute("index") or 0)):
                continue
            if goal := _goal(user):
                reached.add(goal)
            if goal != "update" and not _computes(module, user):
                position = user.operands.index(i.name) if user.opcode == "tuple" else None
                waiting.append((user, site, position))
    return next((goal for goal in ("update", "outside", "output") if goal in reached), "")


def _goal(user: Instruction) -> str:
    scopes = _SCOPE.findall(user.op_name)
    if trace_context.OPTIMIZER in scopes or trace_context.REDUCE in scopes:
        return "update"
    is_outside = user.op_name and "jvp(" not in user.op_name and "transpose(" not in user.op_name
    return "outside" if is_outside else ""


def _computes(module: Module, user: Instruction) -> bool:
    inner = [
        j for name in user.called.get(CALLS.get(user.opcode, ""), ()) for j in module.computations[name].instructions
    ]
    return user.opcode in _COMPUTES or any(j.opcode in _COMPUTES for j in inner)
