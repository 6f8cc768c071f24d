"""Relation between a value on a mesh and the same value on one device, by trial: replicated, sharded, repeated, a
partial sum or mean, or different."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spmdkit.verify.dtypes import wide as widened
from spmdkit.verify.noise import MULTIPLE

PARTS = ("sum", "mean", "maximum", "minimum")
"""Kinds of partial values: a reduction over the devices yields the value of one device."""

FLOOR = 1e-5
"""Relative 2-norm below which two values are equal, if one ulp in the input moves them less."""

FAR = 1e-3
"""Relative 2-norm above which two values differ. From `FLOOR` to `FAR` their relation is open; no line is reported."""

MAX_DIMS = 6
"""Maximum number of dims for which every order of the dims is tried."""

NEAR = 0.01
"""Relative distance from an integer below which a factor counts as that integer."""


class Relation(NamedTuple):
    """Relation of a value on a mesh to its value on one device: `same`; partial `sum`, `mean`, `maximum` or `minimum`
    over axes; `differs`; or `open`."""

    kind: str
    axes: str = ""


def find_relation(
    found: np.ndarray,
    right: np.ndarray,
    stacked: Mapping[str, int],
    axes: Mapping[str, int],
    noise: Callable[[float], float],
    reordered: bool = False,
) -> Relation | None:
    """Returns the relation of `found`, stacked over devices or global, to `right`; None if it is unknown.

    Args:
        reordered: rows may be in another order on the mesh (microbatches, a sharded sequence).
    """
    is_measured = found.dtype.kind == "f" and (
        bool(right.any()) if right.size == 1 else _is_generic(np.sort(right, axis=None))
    )
    if found.dtype.kind in "biu":
        found, right = found.astype(np.float64), right.astype(np.float64)
    near, far = noise(FLOOR), noise(FAR)
    best = math.inf
    by_axis = found.reshape(*stacked.values(), *found.shape[1:]) if stacked else found
    names = [*stacked, *[""] * (by_axis.ndim - len(stacked))]
    in_order = np.sort(right, axis=None)
    is_unknown = False
    for kind, over, candidate in _candidates(by_axis, names, right.size):
        if kind in ("maximum", "minimum") and not is_measured:
            continue  # the extremum of a few indices or counts matches by coincidence
        apart = distance(candidate, right)
        if apart > near and distance(np.sort(candidate, axis=None), in_order) <= near:
            if _is_rearranged(candidate, right, near) or (reordered and _is_generic(in_order)):
                apart = 0.0
            is_unknown |= reordered
        if apart <= near:
            named = " x ".join(n for n in over if n) or _size_named(by_axis.size // max(right.size, 1), axes)
            if named or kind == "same":  # a partial value is partial over mesh axes
                return Relation(kind, named)
        best = min(best, apart)
    if not stacked and any(distance(x, right) <= near for x in _repeated(found, right, axes)):
        return Relation("same")
    if is_unknown:
        return None
    return Relation("differs" if best > far else "open")


def _repeated(found: np.ndarray, right: np.ndarray, axes: Mapping[str, int]) -> Iterator[np.ndarray]:
    """Yields the global forms of a value that a vmap over replicas does not map: all replicas share it."""
    if found.ndim != right.ndim or not found.size or not _size_named(right.size // found.size, axes):
        return
    for d in range(found.ndim):
        repeated = np.concatenate([found] * (right.size // found.size), axis=d)
        if repeated.shape == right.shape:
            yield repeated


def _is_rearranged(x: np.ndarray, right: np.ndarray, near: float) -> bool:
    """Returns whether `x` is `right` with its dims in another order: sharded or mapped along another dim than the
    first."""
    x = x.squeeze()  # most axes of a mesh have one device
    if x.ndim > MAX_DIMS:
        return True
    orders = itertools.permutations(range(x.ndim))
    return any(distance(x.transpose(order), right) <= near for order in orders)


def _is_generic(in_order: np.ndarray) -> bool:
    """Returns whether at least half of the sorted numbers are distinct, so that equal sets of numbers are evidence."""
    return bool(2 * (in_order[1:] > in_order[:-1]).sum() >= in_order.size)


def _candidates(x: np.ndarray, names: Sequence[str], size: int) -> Iterator[tuple[str, list[str], np.ndarray]]:
    """Yields (kind, names of the dims, values): the ways to obtain a one-device value of that size from `x`."""
    if x.size == size:
        yield "same", [], x
    if not size or x.size % size or (x.size == size and size > 1 and not any(names)):
        return
    times = x.size // size
    for num in range(min(3, x.ndim) + 1):
        for dims in itertools.combinations(range(x.ndim), num):
            count = math.prod(x.shape[d] for d in dims)
            if count == 1 or (any(names) and not all(names[d] for d in dims)):
                continue  # the additional elements are due to devices
            if count == times:
                yield from _over(x, dims, names)


def _over(x: np.ndarray, dims: Sequence[int], names: Sequence[str]) -> Iterator[tuple[str, list[str], np.ndarray]]:
    """Yields the reductions of `x` that treat it as replicated along some of `dims` and as partial along the rest."""
    scale = float(np.abs(x).max(initial=0)) if np.isfinite(x).all() else 0.0
    for num in range(len(dims), -1, -1):
        for same in itertools.combinations(dims, num):
            first = x
            for d in same:
                first = np.take(first, [0], axis=d)
            if not np.allclose(x, first, rtol=1e-4, atol=1e-5 * scale, equal_nan=True):
                continue
            rest = tuple(d for d in dims if d not in same)
            if not rest:
                yield "same", [names[d] for d in same], first
                return
            over = [names[d] for d in rest]
            yield "sum", over, first.sum(rest)
            yield "mean", over, first.mean(rest)
            if len(rest) == len(dims):
                yield "maximum", over, first.max(rest)
                yield "minimum", over, first.min(rest)


def _size_named(size: int, axes: Mapping[str, int]) -> str:
    for num in range(1, len(axes) + 1):
        for names in itertools.combinations(axes, num):
            if math.prod(axes[n] for n in names) == size:
                return " x ".join(names)
    return ""


def distance(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the 2-norm of the elementwise difference. Non-finite elements add zero if both arrays agree in them;
    otherwise the distance is infinite."""
    x, y = widened(x).ravel(), widened(y).ravel()
    if x.size != y.size:
        return math.inf
    finite = np.isfinite(x) & np.isfinite(y)
    if finite.all():
        return float(np.linalg.norm(x - y))
    rest = np.array_equal(x[~finite], y[~finite], equal_nan=True)
    return float(np.linalg.norm(x[finite] - y[finite])) if rest else math.inf


def noise_of(right: np.ndarray, ulps: Sequence[np.ndarray], least: float) -> float:
    """Returns the distance from `right` that counts as noise: `least` times its norm, or `MULTIPLE` times the effect of
    one ulp in the input."""
    wide = widened(right)
    norm = float(np.linalg.norm(wide[np.isfinite(wide)]))
    moved = max((distance(x, right) for x in ulps), default=0.0)
    return max(least * norm, MULTIPLE * moved if math.isfinite(moved) else 0.0, 1e-30)


def difference(
    found: np.ndarray, right: np.ndarray, stacked: Mapping[str, int], axes: Mapping[str, int]
) -> tuple[str, str] | None:
    """Returns a description (how a value differs, over which axes), or None if there is no simple relation."""
    x, y = widened(found), widened(right)
    every = " x ".join(axes)
    by_axis = x.reshape(*stacked.values(), *x.shape[1:]) if stacked else x
    names = [*stacked, *[""] * (by_axis.ndim - len(stacked))]
    for _, _, candidate in _candidates(by_axis, names, y.size):
        flat, whole = candidate.ravel(), y.ravel()
        finite = np.isfinite(flat) & np.isfinite(whole)
        flat, whole = flat[finite], whole[finite]
        factor = float(np.vdot(whole, flat).real / max(float(np.vdot(whole, whole).real), 1e-300))
        if factor and np.linalg.norm(flat - factor * whole) <= FAR * float(np.linalg.norm(flat)):
            times = max(abs(factor), 1 / abs(factor))
            of = _size_named(round(times), axes) if abs(times / round(times) - 1) < NEAR else ""
            if y.size == 1 and not of:
                continue  # any number is a multiple of another
            word = f"is {factor:.4g} times" if abs(factor) > 1 else f"is 1/{1 / factor:.4g} of"
            return f"{word} the value on one device{f': the size of {of}' if of else ''}", of or every
    if x.ndim and y.ndim and x.size == y.size and x.size:
        rows = [np.sort(z.reshape(-1, y.shape[-1]).sum(-1)) for z in (x, y)]
        if rows[0].shape == rows[1].shape and np.allclose(rows[0], rows[1], rtol=1e-4, atol=1e-6):
            return "has the rows of one device in a different order", every
    if stacked and x.shape[1:] == y.shape:
        over = " x ".join(axis for axis, size in stacked.items() if size > 1)
        return f"is a per-shard value that differs along {over}", over
    if x.size == y.size:
        error = distance(x, y) / max(float(np.linalg.norm(y[np.isfinite(y)])), 1e-30)
        return f"differs from the value on one device (relative error {error:.1e})", every
    return None
