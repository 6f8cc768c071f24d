"""Lengths of the scans of a jaxpr by the path that XLA shows for their loops: the last resort for a trip count."""

from __future__ import annotations

from typing import Any

_INSIDE = {"scan": "while/body/closed_call", "while": "while/body", "shard_map": "shard_map", "cond": "cond"}


def scan_lengths(jaxpr: Any, name: str) -> dict[str, int]:
    """Returns op_name -> length of the scans of a closed jaxpr that was traced from a function called `name`.

    A path that several loops share with different lengths, or with a loop of no fixed length, is left out.
    """
    lengths: dict[str, set[int | None]] = {}

    def visit(jaxpr: Any, prefix: str) -> None:
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            stack = str(eqn.source_info.name_stack)
            path = f"{prefix}/{stack}" if stack else prefix
            primitive = eqn.primitive.name
            if primitive in ("scan", "while"):
                lengths.setdefault(f"{path}/while", set()).add(eqn.params.get("length"))
            inside = _INSIDE.get(primitive)
            if primitive in ("jit", "pjit"):
                inside = f"jit({eqn.params['name']})"
            below = f"{path}/{inside}" if inside else path
            for value in eqn.params.values():
                for inner in value if isinstance(value, (tuple, list)) else (value,):
                    if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                        visit(inner, below)

    visit(jaxpr, f"jit({name})")
    return {path: next(iter(n)) for path, n in lengths.items() if len(n) == 1 and None not in n}  # type: ignore[misc]
