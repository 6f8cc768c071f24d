"""Where a hand-written step first differs from one device: its jaxprs are evaluated with taps, as those of a task
(locate.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from spmdkit.verify.locate import Location, locate, tapped


class Traced(NamedTuple):
    """A step on its devices: the function, its arguments, and the mesh that is set while it runs, if any."""

    run: Callable[..., Any]
    arguments: Sequence[Any]
    mesh: Mesh | None = None


def locate_step(one: Traced, moved: Sequence[Sequence[Any]], many: Traced, axes: Mapping[str, int]) -> Location | None:
    """Returns where a step on a mesh first differs from one device. None if it cannot be traced from outside, or no
    single line is responsible.

    Args:
        moved: arguments of the one device, moved by one ulp.
        axes: sizes of the mesh's axes.
    """
    large = {axis: size for axis, size in axes.items() if size > 1}
    try:
        with _set(one.mesh):
            on_one = tapped(jax.make_jaxpr(one.run)(*one.arguments))
            right, *ulps = (on_one(jax.tree.leaves(tuple(given))) for given in (one.arguments, *moved))
        with _set(many.mesh):
            found = tapped(jax.make_jaxpr(many.run)(*many.arguments))(jax.tree.leaves(tuple(many.arguments)))
    except Exception:  # noqa: BLE001 - the step is compiled already or has side effects; the case fails without a location
        return None
    return locate(right, ulps, found, large)


def _set(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
