"""Reads a step's jaxpr: its equations with XLA's op names, the user's lines, and the values that depend on the
batch."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from spmdkit import compat
from spmdkit.foundation.jaxprs import equations_within, inner_jaxprs
from spmdkit.plan.hlo.source import line_of
from spmdkit.plan.hlo.text import Frame
from spmdkit.step import trace_context

_INSIDE = {"scan": "while/body/closed_call", "while": "while/body", "shard_map": "shard_map", "cond": "cond"}


def paths(jaxpr: Any, name: str) -> Iterator[tuple[Any, str]]:
    """Yields (equation, op_name without the operation's part) for a jaxpr traced from a function called `name`."""

    def enter(eqn: Any, prefix: str) -> tuple[str, str]:
        stack = str(eqn.source_info.name_stack)
        path = f"{prefix}/{stack}" if stack else prefix
        primitive = eqn.primitive.name
        inside = f"jit({eqn.params['name']})" if primitive in ("jit", "pjit") else _INSIDE.get(primitive)
        return path, f"{path}/{inside}" if inside else path

    return equations_within(jaxpr, f"jit({name})", enter)


def scan_lengths(jaxpr: Any, name: str) -> dict[str, int]:
    """Returns op_name -> length of the scans of a jaxpr: the fallback for a trip count.

    An op_name that several loops share with different lengths, or with a loop of no fixed length, is omitted.
    """
    lengths = defaultdict[str, set[Any]](set)
    for eqn, path in paths(jaxpr, name):
        if eqn.primitive.name in ("scan", "while"):
            lengths[f"{path}/while"].add(eqn.params.get("length"))
    return {path: n.pop() for path, n in lengths.items() if len(n) == 1 and None not in n}


def idle_share(jaxpr: Any, name: str, num_stages: int) -> float:
    """Returns the share of the executions of a pipeline's stages that compute nothing: (P - 1) / ticks, where the ticks
    of the forward pass are the first two loops of `sk.pipeline` (`ops/pipeline/schedule.py`). 0 without a pipeline."""
    loops = (
        eqn.params["length"]
        for eqn, path in paths(jaxpr, name)
        if eqn.primitive.name == "scan" and path.rstrip(")").endswith(trace_context.PIPELINE)
    )
    num_ticks = sum(itertools.islice(loops, 2)) if num_stages > 1 else 0
    return (num_stages - 1) / num_ticks if num_ticks else 0.0


def lines_of(jaxpr: Any, name: str, op_name: str) -> list[str]:
    """Returns the user's lines of the equations that XLA shows as `op_name`."""
    lines = [line(eqn) for eqn, path in paths(jaxpr, name) if f"{path}/{eqn.primitive.name}" == op_name]
    return [at for at in dict.fromkeys(lines) if at is not None]


def line(eqn: Any) -> str | None:
    """Returns `file.py:12` of the user's line that created an equation."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return None
    frames = tuple(Frame(f.file_name, f.line_num, f.function_name) for f in traceback.frames)
    return line_of(tuple(f for f in frames if "/jax/_src/" not in f.file))


def first_use(jaxpr: Any, var: Any) -> str | None:
    """Returns the line of the first equation that computes with a variable, including equations inside calls."""
    for eqn in jaxpr.eqns:
        if not any(x is var for x in eqn.invars):
            continue
        for body in inner_jaxprs(eqn):
            position = next(n for n, x in enumerate(eqn.invars) if x is var)
            offset = len(eqn.invars) - len(body.invars)
            if 0 <= position - offset < len(body.invars):
                use = first_use(body, body.invars[position - offset])
                if use is not None:
                    return use
        return line(eqn)
    return None


def depending(
    jaxpr: Any, inputs: Sequence[bool], found: list[tuple[Any, Any]], into_manual: bool = False
) -> list[bool]:
    """Returns which results depend on the marked inputs, and adds (equation, output) to `found` for every dependent
    output outside `shard_map`, with `into_manual` also inside. If one element of a loop's carry depends on them, all
    elements do."""
    marked = {id(v) for v, mark in zip(jaxpr.invars, inputs, strict=True) if mark}
    for eqn in jaxpr.eqns:
        name, marks = eqn.primitive.name, [id(x) in marked for x in eqn.invars]
        if not any(marks):
            continue
        outs = [True] * len(eqn.outvars)
        for body in inner_jaxprs(eqn) if into_manual or name != "shard_map" else ():
            offset = len(eqn.invars) - len(body.invars)
            given = marks[offset:] if offset >= 0 and name != "while" else [True] * len(body.invars)
            if name == "scan":
                first, length = compat.carried_inputs(eqn)
                given[first : first + length] = [True] * length
            results = depending(body, given, found, into_manual)
            if len(results) == len(outs) and name not in ("while", "cond"):
                outs = results
        dependent = [out for out, mark in zip(eqn.outvars, outs, strict=True) if mark]
        marked.update(map(id, dependent))
        found += [(eqn, out) for out in dependent]
    return [id(v) in marked for v in jaxpr.outvars]
