"""Maps an instruction to its line in the user's program."""

from __future__ import annotations

import functools
import itertools
import linecache
import os
from collections.abc import Callable
from pathlib import Path

from spmdkit.plan.hlo.text import Frame, Instruction, Module
from spmdkit.step.step import global_step, replica_step

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_LIBRARIES = ("site-packages" + os.sep, "dist-packages" + os.sep, os.sep + "lib" + os.sep + "python")
_STEP = tuple(f"{maker.__qualname__}." for maker in (global_step, replica_step))
"""Package functions with these prefixes are the step itself: user frames inside them are the user's step."""
_NEAR = 6


def source_of(module: Module, instruction: Instruction) -> str | None:
    """Returns `file.py:12` for an instruction, or None.

    The innermost user line inside the step; otherwise (the reducer's sum, the optimizer's update) the innermost line of
    spmdkit, as `spmdkit/communication/reducers/sum.py:17`. For an instruction that XLA created, the line of the nearest
    producer or reader.
    """
    near = _nearest(module, instruction, lambda i: bool(module.frames(i))) if module.has_frames else None
    return None if near is None else line_of(module.frames(near))


def op_name_of(module: Module, instruction: Instruction) -> str:
    """Returns JAX's op name of an instruction, or of the nearest one that has one; empty if none has."""
    near = _nearest(module, instruction, lambda i: bool(i.op_name) and i.opcode != "parameter")
    return "" if near is None else near.op_name


@functools.lru_cache(maxsize=10_000)
def line_of(frames: tuple[Frame, ...]) -> str | None:
    """Returns the line to show for a stack (innermost first), or None for an empty one."""
    inside = list(itertools.takewhile(lambda f: not (_is_ours(f) and f.function.startswith(_STEP)), frames))
    ours = [f for f in inside if _is_ours(f)]
    users = [f for f in inside if not _is_ours(f) and not any(part in f.file for part in _LIBRARIES)]
    if len(inside) == len(frames) and ours and users:  # outside a step: the frames outside spmdkit are the caller's
        last = max(i for i, f in enumerate(inside) if _is_ours(f))
        users = [f for f in users if inside.index(f) < last] or users
    frame = next(iter((*users, *ours, *inside)), None)
    if frame is None or not _is_ours(frame):
        return None if frame is None else f"{frame.file}:{frame.line}"
    return f"spmdkit/{frame.file.removeprefix(_PACKAGE).replace(os.sep, '/')}:{frame.line}"


def text_of(source: str | None) -> str:
    """Returns the text of `file.py:12`; empty if the file cannot be read."""
    path, _, number = (source or "").rpartition(":")
    if path.startswith("spmdkit/"):
        path = _PACKAGE + path.removeprefix("spmdkit/")
    return linecache.getline(path, int(number)).strip() if number.isdigit() else ""


def _is_ours(frame: Frame) -> bool:
    return frame.file.startswith(_PACKAGE)


def _nearest(module: Module, start: Instruction, good: Callable[[Instruction], bool]) -> Instruction | None:
    """Returns the nearest `good` instruction: itself, its producers, its readers, or inside a called computation."""
    if good(start):
        return start
    computation = module.around(start)
    for neighbours in (computation.operands, lambda i: computation.users[i.name]):
        layer, seen = [start], {start.name}
        for _ in range(_NEAR):
            layer = list({j.name: j for i in layer for j in neighbours(i) if j.name not in seen}.values())
            seen |= {j.name for j in layer}
            for j in sorted(layer, key=lambda j: -j.bytes):  # of a merged collective, the largest array
                fused = (k for name in j.calls for k in reversed(module.computations[name].instructions))
                if (nearest := next((k for k in (j, *fused) if good(k)), None)) is not None:
                    return nearest
    return None
