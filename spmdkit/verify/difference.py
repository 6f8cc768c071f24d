"""`find_difference`: where two results first differ, and how: a factor, one leaf, only short batches.

Numbers only. diagnosis.py gives their meaning and the repair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from spmdkit.verify.compare import Errors
from spmdkit.verify.dtypes import wide
from spmdkit.verify.noise import Noise, parts
from spmdkit.verify.task_runner import Results, Tree

FIT = 0.02
"""Relative 2-norm by which a leaf may differ from a multiple of another and still count as one."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """How a case differs from one device.

    Attributes:
        quantity: the first one that differs (`loss`, `gradient`, ...).
        leaf: the first leaf of that quantity that differs, in the order of the tree.
        error: of that leaf.
        num_wrong, num_leaves: leaves of that quantity that differ, and all leaves.
        factor: the wrong leaves are this multiple of the right ones; None if they are no multiple.
        counts: (here, on one device) counts of the loss; None if equal.
        only_short: the full batch agrees, and the short one does not.
        batch: index of the first batch that differs.
    """

    quantity: str
    leaf: str
    error: float
    num_wrong: int = 1
    num_leaves: int = 1
    factor: float | None = None
    counts: tuple[float, float] | None = None
    only_short: bool = False
    batch: int = 0


def find_difference(
    found: Results, expected: Results, errors: Errors, tolerance: Mapping[str, float], noise: Noise, short: bool
) -> Difference:
    """Returns how `found` differs, for a case that failed."""
    failed = errors.failed(tolerance)
    quantity = "gradient" if "gradient" in failed else failed[0]
    if quantity == "loss" and "update" in failed and errors.leaf["loss"].startswith("step"):
        quantity = "update"  # a later step's loss differs since a step before it was another one
    if quantity not in ("gradient", "update", "parameter", "state"):
        value, leaf = errors.worst[quantity], errors.leaf[quantity]
        only_short = quantity == "loss" and short and leaf == "batch 2"
        return Difference(
            quantity,
            leaf,
            float(value or 0.0),
            counts=_counts(found, expected),
            only_short=only_short,
            batch=int(only_short),
        )
    trees = parts(quantity, found, expected)
    wrong = [{path: e for path, e in noise.errors(part).items() if not e <= tolerance[quantity]} for part in trees]
    which = next(i for i, by_leaf in enumerate(wrong) if by_leaf)
    (_, mine, right), by_leaf = trees[which], wrong[which]
    leaf = next(path for path in right if path in by_leaf)
    return Difference(
        quantity,
        leaf,
        by_leaf[leaf],
        num_wrong=len(by_leaf),
        num_leaves=len(right),
        factor=factor_of(mine, right, list(by_leaf)),
        counts=_counts(found, expected),
        only_short=quantity == "gradient" and short and which == 1,
        batch=which if quantity == "gradient" else 0,
    )


def _counts(found: Results, expected: Results) -> tuple[float, float] | None:
    for mine, right in zip(found.batches, expected.batches, strict=True):
        if mine.count is not None and right.count and abs(mine.count / right.count - 1) > 1e-4:
            return mine.count, right.count
    return None


def factor_of(found: Tree, expected: Tree, paths: list[str]) -> float | None:
    """Returns the common factor between the leaves `paths`, or None."""
    mine, right = (np.concatenate([wide(t[p]).ravel() for p in paths if p in found]) for t in (found, expected))
    if mine.shape != right.shape or not np.isfinite(mine).all() or not right.any():
        return None
    factor = float(np.vdot(right, mine).real / np.vdot(right, right).real)
    rest = np.linalg.norm(mine - factor * right) / max(float(np.linalg.norm(mine)), 1e-30)
    return factor if rest < FIT and abs(factor) > 1e-6 else None
