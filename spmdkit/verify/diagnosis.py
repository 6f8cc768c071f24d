"""Diagnosis of a difference: the kind of bug that causes it, the observation, and the repair."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from spmdkit.foundation.formatting import shown, shown_axes
from spmdkit.mesh.mesh import MODEL_AXES, REPLICA_AXES
from spmdkit.verify.compare import Errors
from spmdkit.verify.dtypes import wide
from spmdkit.verify.noise import Noise, parts
from spmdkit.verify.task_runner import Results, Tree

FIT = 0.02
"""Relative 2-norm by which a leaf may differ from a multiple of another leaf and still count as this multiple."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between a case and one device.

    Attributes:
        quantity: the first quantity that differs (`loss`, `gradient`, ...).
        leaf: the first leaf of the quantity that differs, in tree order.
        error: the error of this leaf.
        num_wrong, num_leaves: number of leaves of the quantity that differ, and of all its leaves.
        factor: ratio of the wrong leaves to the right ones; None if there is no common ratio.
        counts: counts of the loss (in this case, on one device); None if equal.
        only_short: the full batch agrees, and the short batch does not.
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
    """Returns the difference between `found` and `expected` in a failed case."""
    failed = errors.failed(tolerance)
    quantity = "gradient" if "gradient" in failed else failed[0]
    if quantity == "loss" and "update" in failed and errors.leaf["loss"].startswith("step"):
        quantity = "update"  # the loss of a later step differs because an earlier update does
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
    """Returns the common ratio of the leaves `paths`, found to expected, or None."""
    mine, right = (np.concatenate([wide(t[p]).ravel() for p in paths if p in found]) for t in (found, expected))
    if mine.shape != right.shape or not np.isfinite(mine).all() or not right.any():
        return None
    factor = float(np.vdot(right, mine).real / np.vdot(right, right).real)
    rest = np.linalg.norm(mine - factor * right) / max(float(np.linalg.norm(mine)), 1e-30)
    return factor if rest < FIT and abs(factor) > 1e-6 else None


NEAR = 0.02
"""Relative distance at which a factor counts as an integer."""


class Diagnosis(NamedTuple):
    """A kind of bug: its short name, the observation, and the smallest repair."""

    kind: str
    found: str
    repair: str


REPAIRS = {
    "checkpoint": (
        "The checkpoint loses or changes a leaf of the state. This is a bug in spmdkit or in a user-defined leaf type."
    ),
    "replicas apart": (
        "Every replica must reduce the results of a step in the same way. This is a bug in spmdkit, a reducer or JAX."
    ),
    "optimizer": (
        "The optimizer computes a value over its own shard (a norm, a trust ratio), or its state cannot be sharded. "
        "Use optax transformations in the global view, or sk.pmean in a per-replica step."
    ),
    "model state": (
        "The new model state is computed from one replica's examples and then averaged. The average of variances is "
        'not the variance of all examples. Compute it over the axes ("replica", "data"), as '
        'BatchNorm(axis_name=("replica", "data")) does.'
    ),
    "metric": "Pass sk.mean one value per example, not a mean that is already computed.",
    "later step": "State that the step carries over (optimizer state, model state, moving average) differs by mesh.",
    "key folded by device": (
        "The loss draws from its plain `key`, which differs by replica and microbatch. Draw from sk.example_keys(): "
        "one key per example, equal on every mesh."
    ),
    "short batch": (
        "Replicas hold unequal numbers of examples in it. Sum and count must be added up before the division: return "
        "sk.mean(per_example_loss), or exclude padding with sk.example_mask()."
    ),
    "batch statistics": (
        "The loss of an example depends on other examples (batch statistics, a loss over pairs), and a replica has "
        'only its own. Compute it over the replicas: BatchNorm(axis_name=("replica", "data")), or lax.pmean(x, '
        '("replica", "data")).'
    ),
    "one leaf": (
        "All other leaves are equal. Check where only this leaf is used: a stop_gradient, a separate reduction, a "
        "layout rule."
    ),
    "mean of means": (
        "The loss computes a mean and passes it to sk.mean as one value, so replicas and microbatches with unequal "
        "counts get equal weights. Pass the values: sk.mean(per_example_loss, where=mask)."
    ),
    "duplicate padding": (
        "Padding rows of a short batch count as examples. Pass sk.mean one value per example, or multiply by "
        "sk.example_mask()."
    ),
    "uneven counts": (
        "The count of the loss depends on how the batch is sharded. It must be the number of averaged values or the "
        "sum of their weights, as in sk.mean(values, where=, weights=)."
    ),
}
"""Kind of bug -> the smallest repair. The kind of `short batch` is `uneven counts`, with a different repair."""

KEEP_ONE_MICROBATCH = " If only cases with microbatches differ, set microbatches: 1."


def _known(kind: str, found: str) -> Diagnosis:
    return Diagnosis(kind, found, REPAIRS[kind])


def diagnose(
    finding: Difference,
    mesh: Mapping[str, int],
    microbatches: int,
    key_matters: Callable[[], bool],
    examples_interact: Callable[[], bool],
) -> Diagnosis:
    """Returns the diagnosis of a difference.

    Args:
        key_matters: returns whether another plain key changes the gradient on one device; called only if needed.
        examples_interact: returns whether two microbatches on one device change the gradient.
    """
    where = _where(finding)
    if finding.quantity == "restore":
        return _known("checkpoint", f"leaf '{finding.leaf}' differs after save and restore")
    if finding.quantity == "replicas":
        found = f"leaf '{finding.leaf}' is not bitwise equal on devices that hold the same part of it"
        return _known("replicas apart", found)
    if finding.quantity in ("loss", "gradient"):
        return _diagnose_gradient(finding, where, mesh, microbatches, key_matters, examples_interact)
    if finding.quantity == "update":
        factor = "" if finding.factor is None else f"; it is {finding.factor:.4g} times the right one"
        return _known("optimizer", f"{where}, while the gradient is right{factor}")
    if finding.quantity == "state":
        return _known("model state", f"{where}, while gradient and update are right")
    if finding.quantity in ("metric", "eval"):
        what = "metric" if finding.quantity == "metric" else "metric of the evaluation"
        return _known("metric", f"{what} '{finding.leaf}' differs by {finding.error:.1e}, while training is equal")
    return _known("later step", f"{where}, while the first gradients and updates are equal")


def _diagnose_gradient(
    finding: Difference,
    where: str,
    mesh: Mapping[str, int],
    microbatches: int,
    key_matters: Callable[[], bool],
    examples_interact: Callable[[], bool],
) -> Diagnosis:
    if finding.counts is not None:
        return _diagnose_counts(*finding.counts, where, mesh, microbatches, finding.only_short)
    if key_matters():
        return _known("key folded by device", f"{where}; another plain key on one device changes the gradient too")
    if finding.only_short:
        return Diagnosis("uneven counts", f"{where}, and only in the short batch", REPAIRS["short batch"])
    factor = _reduction_error(finding.factor, mesh, microbatches)
    if factor is not None:
        return Diagnosis(factor[0], f"{where}; {factor[1]}", factor[2])
    if examples_interact():
        diagnosis = _known("batch statistics", f"{where}; two microbatches on one device differ from one batch too")
        return diagnosis._replace(repair=diagnosis.repair + KEEP_ONE_MICROBATCH * (microbatches > 1))
    if finding.num_wrong == 1 < finding.num_leaves:
        return _known("one leaf", where)
    axes = [shown(a) for a in mesh if a in MODEL_AXES]
    over = f"the model axes {', '.join(axes)}" if axes else "the replica axes"
    return Diagnosis(
        "other",
        where,
        f"The loss is a different function on this mesh. First check its own computation over {over}: collectives, "
        "shard_map, axis_index, the number of its rows, values beyond the shard.",
    )


def _diagnose_counts(
    found: float, expected: float, where: str, mesh: Mapping[str, int], microbatches: int, only_short: bool
) -> Diagnosis:
    counted = f"{where}; the loss counts {found:.6g}, on one device {expected:.6g}"
    if expected <= 1:
        return _known("mean of means", counted)
    if only_short and found > expected:
        return _known("duplicate padding", counted)
    if reduced := _reduction_error(found / expected, mesh, microbatches):
        return Diagnosis(reduced[0], counted, reduced[2])
    return _known("uneven counts", counted)


def _where(finding: Difference) -> str:
    if finding.quantity == "loss":
        return f"the loss differs by {finding.error:.1e} ({finding.leaf})"
    leaves = (
        f"{finding.num_wrong} of {finding.num_leaves} leaves, the first is" if finding.num_wrong > 1 else "only leaf"
    )
    name = {"parameter": "parameters after the steps", "state": "model state"}.get(finding.quantity, finding.quantity)
    return f"{name} differs by {finding.error:.1e} ({leaves} '{finding.leaf}')"


def _reduction_error(factor: float | None, mesh: Mapping[str, int], microbatches: int) -> tuple[str, str, str] | None:
    if (explained := explain_factor(factor, mesh, microbatches)) is None:
        return None
    kind, size, names = explained
    if kind == "reduced twice":
        found = f"the wrong leaves are {size} times the right ones, and {size} is the size of {names}"
        repair = (
            f"A sum over {names} is taken twice. sk.value_and_grad already reduces: remove the other psum, "
            "pmean or factor."
        )
    else:
        found = f"the wrong leaves are 1/{size} of the right ones, and {size} is the size of {names}"
        repair = f"A sum over {names} is missing, or its result is divided again. Let sk.value_and_grad reduce."
    return kind, found, repair


def explain_factor(factor: float | None, mesh: Mapping[str, int], microbatches: int = 1) -> tuple[str, int, str] | None:
    """Returns (`reduced twice` or `not reduced`, size, names of the axes with this size), preferring the simplest axes;
    None if the factor is neither the size of any axes nor its inverse."""
    if factor is None:
        return None
    replicas = {axis: n for axis, n in mesh.items() if axis in REPLICA_AXES and n > 1}
    large = replicas | {axis: n for axis, n in mesh.items() if n > 1}
    micro = {"microbatches": microbatches} if microbatches > 1 else {}
    for group in (replicas, *({axis: n} for axis, n in large.items()), micro, micro and replicas | micro, large):
        size = math.prod(group.values())
        for kind, ratio in (("reduced twice", factor / size), ("not reduced", factor * size)):
            if size > 1 and abs(ratio - 1) < NEAR:
                return kind, size, shown_axes(group)
    return None


def pattern(failed: Iterable[Mapping[str, Any]], passed: Iterable[Mapping[str, Any]]) -> str:
    """Returns a property of all failed cases and no passed case, such as `only with tensor > 1`, or an empty string."""
    bad, good = list(failed), list(passed)
    if not bad or not good:
        return ""
    tests: dict[str, Callable[[Mapping[str, Any]], bool]] = {
        f"only with {shown(axis)} > 1": (lambda case, axis=axis: case["mesh"].get(axis, 1) > 1)  # type: ignore[misc]
        for axis in (*REPLICA_AXES, *MODEL_AXES)
    }
    tests["only with accumulation"] = lambda case: case["microbatches"] > 1
    tests["only with several replicas"] = lambda case: any(case["mesh"].get(a, 1) > 1 for a in REPLICA_AXES)
    tests["only with sharded examples"] = lambda case: any(
        case["mesh"].get(a, 1) > 1 for a in (*REPLICA_AXES, "fsdp", "expert")
    )
    fits = [words for words, test in tests.items() if all(map(test, bad)) and not any(map(test, good))]
    return fits[0] if fits else ""
