"""From an instruction to its line in the user's program."""

from __future__ import annotations

import os
from pathlib import Path

from spmdkit.plan.hlo.text import Frame, Instruction, Module
from spmdkit.step.step import global_step, replica_step

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_LIBRARIES = ("site-packages" + os.sep, "dist-packages" + os.sep, os.sep + "lib" + os.sep + "python")
_STEP = tuple(f"{maker.__qualname__}." for maker in (global_step, replica_step))
"""Functions of the package that begin so are the step itself: what stands inside of them is the user's step."""
_NEAR = 6


def source_of(module: Module, instruction: Instruction) -> str | None:
    """Returns `file.py:12` for an instruction, or None.

    The innermost line of the user's inside the step; else (the reducer's sum, the optimizer's update) the innermost of
    spmdkit's, as `spmdkit/communication/reducers/sum.py:17`. Where XLA made the instruction, the nearest one that feeds
    it or reads it speaks.
    """
    return line_of(stack_of(module, instruction))


def stack_of(module: Module, instruction: Instruction) -> tuple[Frame, ...]:
    """Returns the frames of an instruction, innermost first, or of the nearest one that has any."""
    near = _nearest(module, instruction, lambda i: bool(module.frames(i)))
    return () if near is None else module.frames(near)


def op_name_of(module: Module, instruction: Instruction) -> str:
    """Returns the path of JAX's names of an instruction, or of the nearest one that has it; empty where none has."""
    near = _nearest(module, instruction, lambda i: bool(i.op_name) and i.opcode != "parameter")
    return "" if near is None else near.op_name


def line_of(frames: tuple[Frame, ...]) -> str | None:
    """Returns the line to show for a stack (innermost first), or None for an empty one."""
    inside = []
    for frame in frames:
        if frame.file.startswith(_PACKAGE) and frame.function.startswith(_STEP):
            break
        inside.append(frame)
    ours = [f for f in inside if f.file.startswith(_PACKAGE)]
    users = [f for f in inside if not f.file.startswith(_PACKAGE) and not any(part in f.file for part in _LIBRARIES)]
    if len(inside) == len(frames) and ours and users:  # no step around it: what stands outside of spmdkit is the caller
        last = max(i for i, f in enumerate(inside) if f.file.startswith(_PACKAGE))
        users = [f for f in users if inside.index(f) < last] or users
    for frame in (*users, *ours, *inside):
        file = frame.file
        if file.startswith(_PACKAGE):
            file = "spmdkit/" + file.removeprefix(_PACKAGE).replace(os.sep, "/")
        return f"{file}:{frame.line}"
    return None


def _nearest(module: Module, start: Instruction, good) -> Instruction | None:  # type: ignore[no-untyped-def]
    """Returns the nearest instruction that is good: itself, what it calls, what feeds it, what reads it."""
    if good(start):
        return start
    computation = module.computations[start.computation]
    for direction in ("operands", "users"):
        layer, seen = [start], {start.name}
        for _ in range(_NEAR):
            following = []
            for i in layer:
                near = (
                    [computation.by_name[n] for n in i.operands if n in computation.by_name]
                    if direction == "operands"
                    else computation.users[i.name]
                )
                following += [j for j in near if j.name not in seen]
                seen |= {j.name for j in near}
            for j in following:
                if good(j):
                    return j
                for name in j.called.get("calls", ()):
                    inside = next((k for k in reversed(module.computations[name].instructions) if good(k)), None)
                    if inside is not None:
                        return inside
            layer = following
    return None
