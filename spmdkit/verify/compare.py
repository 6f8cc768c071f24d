"""What differs between two results, in numbers; and how much may differ. The tolerance is here, in one place.

    error(leaf) = |found - expected| / max(|expected|, 1e-3 |whole tree|)          2-norms

    tolerance = max(FLOOR_ULPS * eps, MULTIPLE * largest error that one ulp in the input makes on one device)

The second term is measured with the user's own function: parameters and floating point examples are moved by one ulp up or down at
random, NUM_PROBES times. Summation in another order moves a number by a few ulps too, so what a mesh may change is of that size;
what a mistake changes is of the order of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spmdkit.verify.subject import Results, Tree

MULTIPLE = 32
"""Times the effect of one ulp in the input. A step adds in another order at every product and every sum; seen: at most 12 times."""

FLOOR_ULPS = 64
"""Ulps below which nothing is told apart: 7.6e-6 in float32, 1.4e-14 in float64."""

LARGEST = 1e-2
"""A tolerance is never larger: a function that turns one ulp into 3e-4 cannot be verified, and that is said."""

NUM_PROBES = 3
SMALL_LEAF = 1e-3
"""Fraction of the tree's norm below which a leaf's norm is no measure: its true value may be zero."""

QUANTITIES = ("loss", "gradient", "update", "parameter", "metric", "state", "eval", "restore", "replicas")
"""What is compared, in the order in which a mistake shows."""

EXACT = {"restore": 0.0, "replicas": 0.0}
"""Equal bit for bit: a state and what a checkpoint gives back, and the copies of a leaf on several devices."""


@dataclasses.dataclass
class Errors:
    """The worst error of each quantity, None where it was not compared, with the leaf that has it."""

    worst: dict[str, float | None]
    leaf: dict[str, str]

    def failed(self, tolerance: Mapping[str, float]) -> list[str]:
        """Returns the quantities that are out of tolerance; what is not a number is."""
        return [q for q in QUANTITIES if (e := self.worst.get(q)) is not None and not e <= tolerance[q]]


def leaf_errors(found: Tree, expected: Tree) -> dict[str, float]:
    """Returns path -> error of each floating point leaf; another number of an integer leaf is an error of one."""
    wide = {p: np.asarray(x, np.float64) for p, x in expected.items()}
    floating = {p: x for p, x in wide.items() if _is_floating(expected[p])}
    whole = np.sqrt(sum(float(np.sum(x**2)) for x in floating.values()))
    errors = {}
    for path, x in wide.items():
        if path not in found or found[path].shape != x.shape:
            errors[path] = float("inf")
        elif path in floating:
            norm = max(float(np.linalg.norm(x)), SMALL_LEAF * whole, 1e-30)
            errors[path] = float(np.linalg.norm(np.asarray(found[path], np.float64) - x)) / norm
        else:
            errors[path] = float(not np.array_equal(found[path], expected[path]))
    return errors


def _is_floating(x: np.ndarray) -> bool:
    return x.dtype.kind == "f" or x.dtype.name.startswith(("bfloat16", "float"))


def number_error(found: float, expected: float) -> float:
    """Returns the relative error of one number; equal non-finite numbers are equal."""
    if found == expected or (np.isnan(found) and np.isnan(expected)):
        return 0.0
    return abs(found - expected) / max(abs(expected), 1e-30)


def compare(found: Results, expected: Results) -> Errors:
    """Returns the errors of one result against another."""
    errors = Errors({}, {})
    pairs = list(zip(found.batches, expected.batches, strict=True))
    losses = {f"batch {i + 1}": number_error(f.loss, e.loss) for i, (f, e) in enumerate(pairs)}
    losses |= {
        f"step {i + 1}": number_error(f, e) for i, (f, e) in enumerate(zip(found.losses, expected.losses, strict=True))
    }
    _put(errors, "loss", [losses])
    _put(errors, "gradient", [leaf_errors(f.gradient, e.gradient) for f, e in pairs])
    _put(errors, "update", [leaf_errors(f.update, e.update) for f, e in pairs])
    _put(errors, "update", [leaf_errors(f.optimizer, e.optimizer) for f, e in pairs])
    _put(errors, "parameter", [leaf_errors(found.params, expected.params)])
    _put(errors, "metric", [_number_errors(found.metrics, expected.metrics)])
    _put(errors, "state", [leaf_errors(found.model_state, expected.model_state)])
    if found.evaluation is not None and expected.evaluation is not None:
        _put(errors, "eval", [_number_errors(found.evaluation, expected.evaluation)])
    if found.restored is not None:
        _put(errors, "restore", [{found.restored[1]: found.restored[0]}])
    _put(errors, "replicas", [{found.apart or "": float(found.apart is not None)}])
    return errors


def _number_errors(found: Mapping[str, float], expected: Mapping[str, float]) -> dict[str, float]:
    return {n: number_error(found[n], x) if n in found else float("inf") for n, x in expected.items()}


def _put(errors: Errors, quantity: str, found: list[dict[str, float]]) -> None:
    """Keeps the largest of `found`; NaN counts as the largest."""
    for by_leaf in found:
        for leaf, error in by_leaf.items():
            before = errors.worst.get(quantity)
            if before is None or error > before or (np.isnan(error) and not np.isnan(before)):
                errors.worst[quantity], errors.leaf[quantity] = error, leaf


def tolerances(
    reference: Results, probe: Callable[[int], Results], eps: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns (tolerance, effect of one ulp) of each quantity.

    Args:
        probe: the results of the same program with the input moved by one ulp, for probe 0, 1, ...
        eps: of the dtype.
    """
    moved = dict.fromkeys(QUANTITIES, 0.0)
    for i in range(NUM_PROBES):
        for quantity, error in compare(probe(i), reference).worst.items():
            if error is not None:
                moved[quantity] = max(moved[quantity], float(np.nan_to_num(error, nan=np.inf)))
    moved |= EXACT
    floor = FLOOR_ULPS * eps
    tolerance = {q: min(LARGEST, max(floor, MULTIPLE * e)) for q, e in moved.items()}
    return tolerance | EXACT, moved


def as_numbers(errors: Errors) -> dict[str, Any]:
    """Returns the errors under the names of the JSON."""
    return {f"{quantity}_error": errors.worst.get(quantity) for quantity in QUANTITIES}
