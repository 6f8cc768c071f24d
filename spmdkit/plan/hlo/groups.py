"""The device groups of a collective, and the mesh axes that they span.

XLA numbers devices by their position in the program (the flattened mesh), not by hardware: groups use these logical
numbers on every backend (`use_global_device_ids` with one replica, checked on CPU and TPU).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from spmdkit.plan.hlo.text import Instruction

Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"replica_groups=\{(\{.*?\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=@?mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{(.*?)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})?\}")


def replica_groups(instruction: Instruction, num_devices: int) -> Groups:
    """Returns the groups of logical devices of a collective: lists, iota `[2,4]<=[4,2]T(1,0)` or mesh form; `{}` means
    all devices.

    Raises:
        ValueError: an unknown notation.
    """
    text = instruction.attributes
    if match := _LISTED.search(text):
        return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,\s]*)\}", match[1]))
    if match := _IOTA.search(text):
        order = _order(num_devices, match[2], match[3])
        return _as_groups(order.reshape(_numbers(match[1])))
    if match := _MESH.search(text):
        return _of_mesh(num_devices, *match.groups())
    if "replica_groups={}" in text or "replica_groups" not in text:
        return (tuple(range(num_devices)),)
    raise ValueError(f"replica_groups in a form that is not known: {text[:200]}")


def source_target_pairs(instruction: Instruction) -> Groups:
    """Returns the (source, target) pairs of a collective-permute."""
    match = _PAIRS.search(instruction.attributes)
    return tuple(tuple(_numbers(pair)) for pair in re.findall(r"\{([\d,\s]*)\}", match[1] or "")) if match else ()


def axes_of(groups: Groups, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns axis -> number of positions in one group, for the axes along which its members differ.

    A full axis spans its size; a part of an axis spans less. `sizes` is in mesh order, the last axis the fastest.
    """
    spans = dict.fromkeys(sizes, 1)
    for group in groups:
        places = np.unravel_index(np.asarray(group, int), tuple(sizes.values()))
        for name, positions in zip(sizes, places, strict=True):
            spans[name] = max(spans[name], len(set(positions.tolist())))
    return {name: span for name, span in spans.items() if span > 1}


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.replace(" ", "").split(",") if n]


def _order(num_devices: int, reshape: str | None, transpose: str | None) -> np.ndarray:
    order = np.arange(num_devices)
    if reshape:
        order = order.reshape(_numbers(reshape))
        order = order.transpose(_numbers(transpose)) if transpose else order
    return order.reshape(-1)


def _of_mesh(num_devices: int, mesh: str, reshape: str | None, transpose: str | None, joined: str) -> Groups:
    """Reads `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}`; a part of an axis is `'a':(pre)size`."""
    lengths = {name.strip("'\" "): int(number) for name, number in (axis.rsplit("=", 1) for axis in mesh.split(","))}
    order = _order(num_devices, reshape, transpose)
    requested = {
        name: (int(before), int(size)) if size else (1, lengths[name])
        for name, before, size in re.findall(r"['\"]([^'\"]*)['\"](?::\((\d+)\)(\d+))?", joined)
    }
    shape: list[int] = []
    together: list[int] = []
    for name, length in lengths.items():
        if name not in requested:
            shape.append(length)
            continue
        before, size = requested[name]
        shape += [before, size, length // (before * size)]
        together.append(len(shape) - 2)
    rest = [i for i in range(len(shape)) if i not in together]
    order = order.reshape(shape).transpose(*rest, *together)
    return _as_groups(order.reshape(-1, math.prod(shape[i] for i in together)))


def _as_groups(rows: np.ndarray) -> Groups:
    return tuple(map(tuple, rows.tolist()))
