"""The collectives of a compiled program, read by `spmdkit.plan`, with XLA's names."""

from typing import NamedTuple

from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse


class Collective(NamedTuple):
    """One collective operation."""

    kind: str
    axes: frozenset[str]
    in_loop: bool
    line: str


def collectives(hlo, sizes):
    """Returns every collective of a program on a mesh with axis `sizes`."""
    found = read_bill(parse(hlo), sizes).collectives
    return [
        Collective(c.op.replace("_", "-"), frozenset(c.axes), c.in_loop, f"{c.names[0]} {c.shapes} {c.op_name}")
        for c in found
    ]


def over(found, *axes, kind="all-reduce"):
    """Returns the collectives of one kind over any of `axes`."""
    return [c for c in found if c.kind == kind and c.axes & set(axes)]
