"""Errors between two results, and the tolerance.

    error(leaf) = |actual - expected| / max(|expected|, 1e-3 |whole tree|)          2-norms

    tolerance = max(FLOOR_ULPS * eps, MULTIPLE * largest error that one ulp in the input makes on one device)

The second term is measured NUM_PROBES times with the user's function. A different summation order also moves a number
by a few ulps; a bug changes it by a factor of order one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmdkit.verify import noise as noises
from spmdkit.verify.noise import BOUND, LARGEST, MULTIPLE, Noise
from spmdkit.verify.task_runner import Results

FLOOR_ULPS = 64
"""Smallest tolerance, in ulps: 7.6e-6 in float32, 1.4e-14 in float64."""

NUM_PROBES = 3
QUANTITIES = ("loss", "gradient", "update", "parameter", "metric", "state", "eval", "restore", "replicas")
"""The compared quantities, in the order in which a bug becomes visible."""

EXACT = {"restore": 0.0, "replicas": 0.0}
"""Quantities that must be bitwise equal: a state and its restored checkpoint, and the replicas of a leaf."""


@dataclasses.dataclass
class Errors:
    """The largest error of each quantity (None if it was not compared), and the leaf with this error."""

    worst: dict[str, float | None]
    leaf: dict[str, str]

    def failed(self, tolerance: Mapping[str, float]) -> list[str]:
        """Returns the quantities that exceed the tolerance. NaN exceeds it."""
        return [q for q in QUANTITIES if (e := self.worst.get(q)) is not None and not e <= tolerance[q]]


def number_error(found: float, expected: float) -> float:
    """Returns the relative error of one number; it is zero for two equal infinities and for two NaNs."""
    if found == expected or (np.isnan(found) and np.isnan(expected)):
        return 0.0
    return abs(found - expected) / max(abs(expected), 1e-30)


def compare(found: Results, expected: Results, noise: Noise = Noise()) -> Errors:  # noqa: B008 - frozen
    """Returns the errors of one result relative to another. Numbers below noise are ignored."""
    errors = Errors({}, {})
    pairs = list(zip(found.batches, expected.batches, strict=True))
    losses = {f"batch {i + 1}": number_error(f.loss, e.loss) for i, (f, e) in enumerate(pairs)}
    losses |= {
        f"step {i + 1}": number_error(f, e) for i, (f, e) in enumerate(zip(found.losses, expected.losses, strict=True))
    }
    _put(errors, "loss", [losses])
    for quantity in ("gradient", "update", "parameter", "state"):
        _put(errors, quantity, [noise.errors(part) for part in noises.parts(quantity, found, expected)])
    metrics = [(f.metrics, e.metrics) for f, e in pairs] + [(found.metrics, expected.metrics)]
    _put(errors, "metric", [_number_errors(f, e) for f, e in metrics])
    if found.evaluation is not None and expected.evaluation is not None:
        _put(errors, "eval", [_number_errors(found.evaluation, expected.evaluation)])
    if found.restored is not None:
        _put(errors, "restore", [{found.restored[1]: found.restored[0]}])
    _put(errors, "replicas", [{found.apart or "": float(found.apart is not None)}])
    return errors


def _number_errors(found: Mapping[str, float], expected: Mapping[str, float]) -> dict[str, float]:
    return {n: number_error(found[n], x) if n in found else float("inf") for n, x in expected.items()}


def _put(errors: Errors, quantity: str, found: list[dict[str, float]]) -> None:
    for by_leaf in found:
        for leaf, error in by_leaf.items():
            before = errors.worst.get(quantity)
            if before is None or error > before or (np.isnan(error) and not np.isnan(before)):
                errors.worst[quantity], errors.leaf[quantity] = error, leaf


def tolerances(
    reference: Results, probes: Sequence[Results], eps: float
) -> tuple[dict[str, float], dict[str, float], Noise]:
    """Returns (tolerance of each quantity, effect of one ulp on each quantity, numbers below noise)."""
    noise = noises.measure(reference, probes)
    moved = dict.fromkeys(QUANTITIES, 0.0)
    for probe in probes:
        for quantity, error in compare(probe, reference, noise).worst.items():
            if error is not None:
                moved[quantity] = max(moved[quantity], float(np.nan_to_num(error, nan=np.inf)))
    moved |= EXACT
    floor = FLOOR_ULPS * eps
    tolerance = {q: min(LARGEST, max(floor, MULTIPLE * e)) for q, e in moved.items()}
    if noise.leaves:  # values computed from parameters with noise steps are noisy too
        tolerance |= {q: max(tolerance[q], BOUND * moved[q]) for q in ("metric", "eval", "loss")}
    return tolerance | EXACT, moved, noise


def as_numbers(errors: Errors) -> dict[str, Any]:
    """Returns the errors with their keys in the JSON report."""
    return {f"{quantity}_error": errors.worst.get(quantity) for quantity in QUANTITIES}
