"""The names of JAX that move between versions, for `jax>=0.10.2,<0.12`. Nothing else in the package tests a version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh

T = TypeVar("T")


def varying_axes(x: jax.typing.ArrayLike) -> frozenset[str]:
    """Returns the manual mesh axes over which `x` may differ (empty outside `shard_map`)."""
    aval = jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):
        return frozenset(aval.manual_axis_type.varying)
    return frozenset(getattr(aval, "vma", ()))


def as_varying(tree: T, axes: Sequence[str]) -> T:
    """Returns `tree` with each leaf typed as varying over `axes`; leaves that already vary are left alone."""

    def cast(x):
        missing = tuple(a for a in axes if a not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def auto_mesh(devices: np.ndarray, axes: Sequence[str]) -> Mesh:
    """Returns a mesh whose axes are all of type Auto (`jax.make_mesh` would make them Explicit)."""
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def source_line(eqn: Any) -> str:
    """Returns `file.py:12 (function)` of the user's line that made an equation of a jaxpr."""
    from jax._src import source_info_util

    return source_info_util.summarize(eqn.source_info)


@contextlib.contextmanager
def whole_tracebacks() -> Iterator[None]:
    """While the body runs, exceptions keep JAX's own frames: without them, what JAX refuses looks raised by the caller."""
    before: str = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def coordination_client() -> Any | None:
    """Returns the client of JAX's coordination service (key-value store, barriers), or None in a single process.

    Private in JAX (`jax._src`); its behaviour is pinned by `tests/cluster/test_coordination_service.py`.
    """
    from jax._src import distributed

    return distributed.global_state.client


def backends_initialized() -> bool:
    """Returns whether JAX has already created its devices, after which no setting about them takes effect."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())
