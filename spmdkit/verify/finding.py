"""`find`: where two results part, and in which way: a factor, a shard boundary, one leaf, only short batches.

Numbers only; what they mean, and the repair, is in diagnosis.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from spmdkit.verify.compare import Errors, leaf_errors
from spmdkit.verify.subject import Results, Tree

FIT = 0.02
"""How far from a multiple, relative 2-norm, a leaf may be that is called a multiple: the rest of a mistake may blur it."""


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How a case differs from one device.

    Attributes:
        quantity: the first one that differs (`loss`, `gradient`, ...).
        leaf: the first leaf, in the order of the tree, that differs in it.
        error: of that leaf.
        num_wrong, num_leaves: leaves of that quantity that differ, and all.
        factor: the leaves that differ are this multiple of the right ones, None where they are no multiple.
        counts: (here, on one device) what the loss has counted, None where it is the same.
        only_short: the full batch agrees, and the short one does not.
        boundary: (dim, index): the leaf is right below this index of a dim and wrong from there on, or the other way round.
    """

    quantity: str
    leaf: str
    error: float
    num_wrong: int = 1
    num_leaves: int = 1
    factor: float | None = None
    counts: tuple[float, float] | None = None
    only_short: bool = False
    boundary: tuple[int, int] | None = None


def find(found: Results, expected: Results, errors: Errors, tolerance: Mapping[str, float], short: bool) -> Deviation:
    """Returns how `found` differs, for a case that failed.

    Args:
        short: the second batch is a short one.
    """
    failed = errors.failed(tolerance)
    quantity = "gradient" if "gradient" in failed else failed[0]
    if quantity not in ("gradient", "update", "parameter", "state"):
        value, leaf = errors.worst[quantity], errors.leaf[quantity]
        only_short = quantity == "loss" and short and leaf == "batch 2"
        return Deviation(quantity, leaf, float(value or 0.0), counts=_counts(found, expected), only_short=only_short)
    parts = _trees(quantity, found, expected)
    wrong = [_wrong(f, e, tolerance[quantity]) for f, e in parts]
    which = next(i for i, by_leaf in enumerate(wrong) if by_leaf)
    (mine, right), by_leaf = parts[which], wrong[which]
    leaf = next(path for path in right if path in by_leaf)
    return Deviation(
        quantity,
        leaf,
        by_leaf[leaf],
        num_wrong=len(by_leaf),
        num_leaves=len(right),
        factor=_factor(mine, right, list(by_leaf)),
        counts=_counts(found, expected),
        only_short=quantity == "gradient" and short and which == 1,
        boundary=_boundary(mine[leaf], right[leaf], by_leaf[leaf]) if leaf in mine else None,
    )


def _trees(quantity: str, found: Results, expected: Results) -> list[tuple[Tree, Tree]]:
    pairs = list(zip(found.batches, expected.batches, strict=True))
    if quantity == "gradient":
        return [(f.gradient, e.gradient) for f, e in pairs]
    if quantity == "update":
        return [(f.update, e.update) for f, e in pairs] + [(f.optimizer, e.optimizer) for f, e in pairs]
    if quantity == "parameter":
        return [(found.params, expected.params)]
    return [(found.model_state, expected.model_state)]


def _wrong(found: Tree, expected: Tree, tolerance: float) -> dict[str, float]:
    return {path: e for path, e in leaf_errors(found, expected).items() if not e <= tolerance}


def _counts(found: Results, expected: Results) -> tuple[float, float] | None:
    for mine, right in zip(found.batches, expected.batches, strict=True):
        if mine.count is not None and right.count and abs(mine.count / right.count - 1) > 1e-4:
            return mine.count, right.count
    return None


def _factor(found: Tree, expected: Tree, paths: list[str]) -> float | None:
    """Returns the one factor between the leaves `paths`, None where there is none."""
    mine, right = (
        np.concatenate([np.asarray(t[p], np.float64).ravel() for p in paths if p in found]) for t in (found, expected)
    )
    if mine.shape != right.shape or not np.isfinite(mine).all() or not right.any():
        return None
    factor = float(mine @ right / (right @ right))
    rest = np.linalg.norm(mine - factor * right) / max(float(np.linalg.norm(mine)), 1e-30)
    return factor if rest < FIT and abs(factor) > 1e-6 else None


def _boundary(found: np.ndarray, expected: np.ndarray, error: float) -> tuple[int, int] | None:
    """Returns (dim, index) where right turns into wrong or wrong into right, for the dim where that happens once."""
    for dim, length in enumerate(expected.shape):
        if length < 2:
            continue
        others = tuple(d for d in range(expected.ndim) if d != dim)
        difference = np.asarray(found, np.float64) - np.asarray(expected, np.float64)
        by_index = np.sqrt((difference**2).sum(others))
        is_wrong = by_index > 1e-3 * by_index.max()
        turns = np.flatnonzero(is_wrong[1:] != is_wrong[:-1]) + 1
        if len(turns) == 1:
            return dim, int(turns[0])
    return None
