"""A mesh as an SVG: every device at its position in the machine, with the number and the color of its communication group.

A TPU slice is drawn as planes, one grid of x and y for each z; other machines as one grid per host.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

MAX_DEVICES = 1024
NARROW = 360
"""Pixels for a drawing in a narrow window."""
COLORS = ("c5", "c4", "c2", "c8", "c3", "c7")
"""Colors on which the number of a group is readable, as classes of the style sheet."""
_CELL = 30


def draw_groups(mesh: Mapping[str, int], places: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> str:
    """Returns an SVG of the mesh in which the devices of one number and color form a group along `axes`.

    Args:
        mesh: axis -> size, in mesh order.
        places: per device in that order: `coords` in a slice (or none), `part`: host or slice.
    """
    groups = group_numbers(mesh, axes)[: min(len(places), MAX_DEVICES)]
    at, labels, columns, rows = _positions(places[: len(groups)])
    cells = []
    for number, ((x, y), group) in enumerate(zip(at, groups, strict=True)):
        cells.append(
            f'<g><rect x="{x * _CELL + 1}" y="{y * _CELL + 1}" width="{_CELL - 2}" height="{_CELL - 2}" rx="6" '
            f'class="{COLORS[group % len(COLORS)]}"/>'
            f'<text x="{x * _CELL + _CELL / 2}" y="{y * _CELL + _CELL / 2 + 4}">{group}</text><title>device {number}, '
            f"group {group}</title></g>"
        )
    names = "".join(f'<text x="{x * _CELL + 2}" y="{y * _CELL - 6}">{escape(text)}</text>' for x, y, text in labels)
    total = math.prod(mesh.values())
    more = "" if total <= len(groups) else f'<p class="note">the first {len(groups)} of {total} devices</p>'
    size = f"0 -22 {columns * _CELL} {rows * _CELL + 24}"
    wide, narrow = 1.3 * columns * _CELL, 0.8 * columns * _CELL  # few devices are not magnified, many are readable
    width = f"width: {wide:.0f}px; max-width: max(100%, {narrow:.0f}px)"
    drawn = f'<svg class="mesh" style="{width}" viewBox="{size}" role="img">{names}{"".join(cells)}</svg>'
    hint = '<p class="note hint">Scroll sideways for all devices.</p>' if narrow > NARROW else ""
    return f'{hint}<div class="scroll sideways">{drawn}</div>{more}'


def group_numbers(mesh: Mapping[str, int], axes: Sequence[str]) -> list[int]:
    """Returns, for each device of the flattened mesh, the number of its group along `axes`."""
    shape = tuple(mesh.values())
    outside = [1 if name in axes else size for name, size in mesh.items()]
    number = np.arange(math.prod(outside)).reshape(outside)
    return [int(n) for n in np.broadcast_to(number, shape).reshape(-1)]


def _positions(
    places: Sequence[Mapping[str, Any]],
) -> tuple[list[tuple[float, float]], list[tuple[float, float, str]], float, float]:
    """Returns (x and y of each device in cells, labels, columns, rows)."""
    is_slice, seen = bool(places and places[0]["coords"]), Counter[Any]()
    coords = []
    for place in places:
        coordinates, n = tuple(place["coords"] or ()), seen[place["part"]]
        seen[place["part"]] += 1
        coords.append((*coordinates, 0, 0)[:3] if is_slice else (n % 16, n // 16, 0))
    width, height = (max(c[i] for c in coords) + 1 for i in (0, 1))
    keys = sorted({(p["part"], c[2]) for p, c in zip(places, coords, strict=True)})
    shared = Counter[Any]()
    cores = max(1, round(len(places) / len({(p["part"], *c) for p, c in zip(places, coords, strict=True)})))
    wide = max(20, round(math.sqrt(2.2 * len(places))))
    across = max(1, min(len(keys), wide // (width * cores + 1)))
    corner: Callable[[int], tuple[float, float]] = lambda n: (
        (n % across) * (width * cores + 0.7),
        (n // across) * (height + 1.0),
    )
    at = []
    for place, c in zip(places, coords, strict=True):
        x, y = corner(keys.index((place["part"], c[2])))
        at.append((x + c[0] * cores + shared[place["part"], c], y + c[1]))
        shared[place["part"], c] += 1
    several = len({part for part, _ in keys}) > 1
    names = [(f"slice {part}, z {z}" if several else f"z {z}") if is_slice else f"host {part}" for part, z in keys]
    labels = [(*corner(n), name) for n, name in enumerate(names)]
    return at, labels, across * (width * cores + 0.7) - 0.7, math.ceil(len(keys) / across) * (height + 1.0) - 1.0
