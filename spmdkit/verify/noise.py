"""`Noise`: the numbers of a result that are rounding noise. Only their size can be compared.

The bias of an attention key cancels in the softmax: the true gradient is zero, and the computed gradient is rounding
error. An optimizer that divides by the size of the gradient (Adam, Lion, LAMB) turns it into full steps, with different
signs on every mesh. Both effects are measured with the tolerance probes, on one device:

    element of a gradient below noise    |g| <= MULTIPLE * largest change of its leaf. Its update, and the parameter
                                         after it, may be BOUND times as large as on one device and in the probes, or
                                         MULTIPLE times their change
    leaf that noise changes              MULTIPLE * its error in a probe > LARGEST, if there are such elements. It may
                                         differ by BOUND times that error
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from spmdkit.verify.dtypes import difference as wide_difference
from spmdkit.verify.dtypes import is_inexact, wide
from spmdkit.verify.task_runner import Results, Tree

SMALL_LEAF = 1e-3
"""Fraction of the tree's norm used as the minimum scale of a leaf's error, since a leaf's true value may be zero."""

MULTIPLE = 32
"""Tolerated multiple of the effect of one ulp in the input. The summation order differs in every product and sum of a
step. The largest observed multiple is 12."""

LARGEST = 1e-2
"""Upper limit of a tolerance. A function that turns one ulp into 3e-4 cannot be verified; the report states it."""

BOUND = 4.0
"""Tolerated multiple of the effect of noise on one device. Adam's noise steps have one size and any sign, so two steps
differ by up to twice their size."""

Part = tuple[str, Tree, Tree]
"""(Name of the tree, found, expected). The name of the first batch's gradient is `gradient 0`."""


@dataclasses.dataclass(frozen=True)
class Noise:
    """The numbers below noise, by tree name and leaf path.

    Attributes:
        elements: bool arrays, True for a number that is noise.
        bounds: largest difference allowed for these numbers, as a 2-norm.
        loose: largest error allowed for a leaf that noise changes throughout.
    """

    elements: Mapping[str, Mapping[str, np.ndarray]] = dataclasses.field(default_factory=dict)
    bounds: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    loose: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def errors(self, part: Part) -> dict[str, float]:
        """Returns path -> error of a tree's leaves, without those within their `loose` bound."""
        name, found, expected = part
        errors = leaf_errors(found, expected, self.elements.get(name, {}), self.bounds.get(name, {}))
        loose = self.loose.get(name, {})
        return {path: e for path, e in errors.items() if not e <= loose.get(path, 0.0)} if loose else errors

    @property
    def leaves(self) -> dict[str, tuple[int, int]]:
        """Path -> (number of elements below noise, number of elements) of the parameters with noise steps."""
        counts: dict[str, tuple[int, int]] = {}
        for by_path in self.elements.values():
            for path, mask in by_path.items():
                counts[path] = max(counts.get(path, (0, mask.size)), (int(mask.sum()), mask.size))
        return counts


def parts(quantity: str, found: Results, expected: Results) -> list[Part]:
    """Returns the trees of a quantity, those of single steps first. A scalar quantity has none."""
    pairs = list(enumerate(zip(found.batches, expected.batches, strict=True)))
    if quantity == "gradient":
        return [(f"gradient {i}", f.gradient, e.gradient) for i, (f, e) in pairs]
    if quantity == "update":
        updates = [(f"update {i}", f.update, e.update) for i, (f, e) in pairs]
        return updates + [(f"optimizer {i}", f.optimizer, e.optimizer) for i, (f, e) in pairs]
    if quantity == "parameter":
        return [("parameter", found.params, expected.params)]
    if quantity == "state":
        states = [(f"state {i}", f.state, e.state) for i, (f, e) in pairs]
        return [*states, ("state", found.model_state, expected.model_state)]
    return []


def leaf_errors(
    found: Tree,
    expected: Tree,
    noise: Mapping[str, np.ndarray] | None = None,
    bounds: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Returns path -> error of each floating point or complex leaf. A different integer leaf has an error of one.

    Args:
        noise: masks of the elements that are ignored, unless they differ by more than the leaf's bound.
    """
    norms = {p: float(np.linalg.norm(wide(x))) for p, x in expected.items() if is_inexact(x)}
    whole = np.sqrt(sum(norm**2 for norm in norms.values()))
    errors = {}
    for path, x in expected.items():
        if path not in found or found[path].shape != x.shape:
            errors[path] = float("inf")
        elif path in norms:
            norm = max(norms[path], SMALL_LEAF * whole, 1e-30)
            difference = wide_difference(found[path], x)
            mask = (noise or {}).get(path)
            if mask is not None and np.linalg.norm(difference[mask]) <= (bounds or {})[path]:
                difference = difference[~mask]
            errors[path] = float(np.linalg.norm(difference)) / norm
        else:
            errors[path] = float(not np.array_equal(found[path], expected[path]))
    return errors


def measure(reference: Results, probes: Sequence[Results]) -> Noise:
    """Returns the numbers below noise on one device."""
    masks = [_below(i, reference, probes) for i in range(len(reference.batches))]
    every = {path: np.any([mask[path] for mask in masks if path in mask], 0) for mask in masks for path in mask}
    elements = {f"update {i}": mask for i, mask in enumerate(masks)} | {"parameter": every}
    bounds: dict[str, dict[str, float]] = {}
    for quantity, steps in (("update", 1), ("parameter", len(reference.losses))):
        for name, _, right in parts(quantity, reference, reference):
            for path, mask in elements.get(name, {}).items():
                moved = max(float(np.linalg.norm((t[path] - right[path])[mask])) for t in _same(quantity, name, probes))
                size = max(float(np.linalg.norm(b.update[path][mask])) for b in reference.batches)
                bounds.setdefault(name, {})[path] = max(BOUND * (moved + steps * size), MULTIPLE * moved)
    noise = Noise(elements, bounds)
    return dataclasses.replace(noise, loose=_loose(noise, reference, probes)) if every else noise


def _same(quantity: str, name: str, results: Sequence[Results]) -> list[Tree]:
    return [found for r in results for part, found, _ in parts(quantity, r, r) if part == name]


def _below(index: int, reference: Results, probes: Sequence[Results]) -> dict[str, np.ndarray]:
    """Returns the elements of a batch's gradient that are no larger than rounding errors and become steps.

    A leaf is included only if noise moves its update by more than any tolerance, or if its entire gradient is noise.
    """
    right = reference.batches[index]
    moved = [
        leaf_errors(p.batches[index].update, right.update)
        for p in probes
        if p.batches[index].update.keys() == right.update.keys()
    ]
    below = {}
    for path, x in right.gradient.items():
        if path not in right.update or right.update[path].shape != x.shape or not is_inexact(x):
            continue
        gradient = wide(x)
        moves = [np.abs(wide(p.batches[index].gradient[path]) - gradient) for p in probes]
        largest = np.max(moves, 0)
        mask = (np.abs(gradient) <= MULTIPLE * largest.max(initial=0.0)) & ((gradient != 0) | (largest > 0))
        if mask.all() or any(MULTIPLE * errors.get(path, 0.0) > LARGEST for errors in moved):
            below[path] = mask
    return {path: mask for path, mask in below.items() if mask.any()}


def _loose(noise: Noise, reference: Results, probes: Sequence[Results]) -> dict[str, dict[str, float]]:
    """Returns the errors allowed for leaves that depend on noise steps: optimizer state, parameters, model state."""
    loose: dict[str, dict[str, float]] = {}
    for quantity in ("update", "parameter", "state"):
        for probe in probes:
            for part in parts(quantity, probe, reference):
                for path, error in noise.errors(part).items():
                    if MULTIPLE * error > LARGEST and _follows(part[0]):
                        of_tree = loose.setdefault(part[0], {})
                        of_tree[path] = max(of_tree.get(path, LARGEST), BOUND * error)
    return loose


def _follows(name: str) -> bool:
    """Returns whether a tree depends on an optimizer step. The model state after a single step does not."""
    return not name.startswith("state ")
