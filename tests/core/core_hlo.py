"""Reading the text of a compiled program: which collectives it holds, over which devices, inside a loop or not."""

import itertools
import re
from typing import NamedTuple

import numpy as np

from spmdkit.mesh import AXES

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class Collective(NamedTuple):
    """One collective operation."""

    kind: str
    axes: frozenset[str]
    in_loop: bool
    line: str


def collectives(hlo, sizes):
    """Returns every collective of a program on a mesh with axis `sizes`."""
    bodies = _computations(hlo)
    looped = _reached(bodies, [c for lines in bodies.values() for line in lines for c in _loops(line)])
    found = []
    for name, lines in bodies.items():
        for line in lines:
            match = re.search(r" ({})(-start)?\(".format("|".join(KINDS)), line)
            if match:
                found.append(Collective(match[1], _axes(line, sizes), name in looped, line.strip()))
    return found


def over(found, *axes, kind="all-reduce"):
    """Returns the collectives of one kind that join devices along any of `axes`."""
    return [c for c in found if c.kind == kind and c.axes & set(axes)]


def _computations(hlo):
    bodies, name = {}, None
    for line in hlo.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{", line)
        if header:
            name = header[1]
            bodies[name] = []
        elif name is not None and " = " in line:
            bodies[name].append(line)
    return bodies


def _loops(line):
    return re.findall(r"(?:body|condition)=%?([\w.\-]+)", line) if " while(" in line else []


def _reached(bodies, start):
    """Returns the computations that are called, directly or not, from those in `start`."""
    seen, todo = set(), list(start)
    while todo:
        name = todo.pop()
        if name in seen or name not in bodies:
            continue
        seen.add(name)
        todo += [word for line in bodies[name] for word in re.findall(r"%([\w.\-]+)", line) if word in bodies]
    return seen


def _axes(line, sizes):
    """Returns the mesh axes along which the members of one group differ."""
    shape = tuple(sizes[axis] for axis in AXES)
    axes = set()
    for group in _groups(line, int(np.prod(shape))):
        places = [np.unravel_index(device, shape) for device in group]
        axes |= {axis for i, axis in enumerate(AXES) if len({place[i] for place in places}) > 1}
    return frozenset(axes)


def _groups(line, num_devices):
    """Returns the groups of devices, from `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)` or `mesh['a'=4,'b'=2], device_ids=... {'a'}`."""
    if pairs := re.search(r"source_target_pairs=\{\{(.*?)\}\}", line):
        return [[int(i) for i in pair.split(",")] for pair in pairs[1].split("},{")]
    if listed := re.search(r"replica_groups=\{\{(.*?)\}\}", line):
        return [[int(i) for i in group.split(",")] for group in listed[1].split("},{")]
    numbers = lambda text: [int(i) for i in text.split(",")]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        order = np.arange(num_devices).reshape(numbers(iota[2]))
        order = order.transpose(numbers(iota[3])) if iota[3] else order
        return order.reshape(numbers(iota[1])).tolist()
    if mesh := re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}", line
    ):
        names, lengths = zip(*(axis.split("=") for axis in mesh[1].split(",")), strict=True)
        order = np.arange(num_devices)
        order = order.reshape(numbers(mesh[2])) if mesh[2] else order
        order = order.transpose(numbers(mesh[3])) if mesh[3] else order
        joined = [names.index(name) for name in mesh[4].split(",")]  # fails on a part of an axis: none seen so far
        order = np.moveaxis(order.reshape([int(n) for n in lengths]), joined, range(-len(joined), 0))
        return order.reshape(-1, int(np.prod([int(lengths[i]) for i in joined]))).tolist()
    assert "replica_groups={}" in line, f"unknown groups in {line}"
    return [list(itertools.chain(range(num_devices)))]
