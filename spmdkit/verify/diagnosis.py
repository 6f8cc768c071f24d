"""What kind of mistake a difference is, in words, and the repair.

what is seen                                              what it is
the loss counts another number than one device            a mean of means, padding that counts
another plain key on one device changes the gradient too  randomness that depends on the replica
every wrong leaf is N or 1/N times the right one          a sum made twice, or not at all
only the short batch differs                              padding that counts, or a mean of means
two microbatches on one device differ too                 examples that depend on each other: batch statistics
right up to an index, wrong beyond                        a seam between shards
the gradient is right, the update is not                  an optimizer that looks at its own shard only
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from spmdkit.mesh.mesh import MODEL_AXES, REPLICA_AXES
from spmdkit.verify.difference import Difference

NEAR = 0.02
"""Relative distance at which a factor is taken for a whole number."""


class Diagnosis(NamedTuple):
    """A kind of mistake: its short name, what was found, and the smallest repair."""

    kind: str
    found: str
    repair: str


def diagnose(
    finding: Difference,
    mesh: Mapping[str, int],
    microbatches: int,
    key_matters: Callable[[], bool],
    examples_interact: Callable[[], bool],
) -> Diagnosis:
    """Returns what a difference means.

    Args:
        key_matters: whether another plain key changes the gradient on one device; asked only where it decides.
        examples_interact: whether two microbatches on one device change the gradient.
    """
    where = _where(finding)
    if finding.quantity == "restore":
        return Diagnosis(
            "checkpoint",
            f"leaf '{finding.leaf}' is another one after it was saved and restored",
            "A leaf of the state is lost or changed on its way through the checkpoint; this is a bug of spmdkit, or of a leaf type of yours.",
        )
    if finding.quantity == "replicas":
        return Diagnosis(
            "replicas apart",
            f"leaf '{finding.leaf}' has other bits on other devices that hold the same part of it",
            "What leaves a step has to be reduced on every replica in the same way; this is a bug of spmdkit, of a reducer, or of JAX.",
        )
    if finding.quantity in ("loss", "gradient"):
        return _diagnose_gradient(finding, where, mesh, microbatches, key_matters, examples_interact)
    if finding.quantity == "update":
        factor = "" if finding.factor is None else f"; it is {finding.factor:.4g} times the right one"
        return Diagnosis(
            "optimizer",
            f"{where}, while the gradient is right{factor}",
            "The optimizer computes something over its own shard (a norm, a trust ratio) or keeps a state that no mesh may cut. "
            "Use optax's own transformations in global view, or sk.pmean in a per-replica step.",
        )
    if finding.quantity == "state":
        return Diagnosis(
            "model state",
            f"{where}, while gradient and update are right",
            "The new model state is computed from one replica's examples and averaged, which is no mean over all of them (a variance is not). "
            'Compute it over the axes ("replica", "data"), as BatchNorm(axis_name=("replica", "data")) does.',
        )
    if finding.quantity in ("metric", "eval"):
        what = "metric" if finding.quantity == "metric" else "metric of the evaluation"
        return Diagnosis(
            "metric",
            f"{what} '{finding.leaf}' differs by {finding.error:.1e}, while the training is right",
            "A metric is sk.mean(values, one per example), not a mean that was taken before.",
        )
    return Diagnosis(
        "later step",
        f"{where}, while the first gradients and updates are right",
        "Something that the step carries on (optimizer state, model state, moving average) differs by mesh.",
    )


LEAVE_MICROBATCHES = " If only cases with microbatches differ, it is so already: leave microbatches at 1."


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
        return Diagnosis(
            "key folded by device",
            f"{where}; another plain key on one device changes the gradient too",
            "The loss draws from its plain `key`, which differs by replica and microbatch. Draw from sk.example_keys(), one key per example, "
            "which is the same on every mesh.",
        )
    if finding.only_short:
        return Diagnosis(
            "uneven counts",
            f"{where}, and only in the short batch",
            "Replicas hold unequal numbers of examples there. Sum and count have to be added before they are divided: return "
            "sk.mean(per_example_loss), or leave padding out with sk.example_mask().",
        )
    factor = _reduction_error(finding.factor, mesh, microbatches)
    if factor is not None:
        return Diagnosis(factor[0], f"{where}; {factor[1]}", factor[2])
    if examples_interact():
        return Diagnosis(
            "batch statistics",
            f"{where}; two microbatches on one device differ from one batch too",
            "The loss of an example depends on the others (batch statistics, a loss over pairs), and a replica sees only its own. Compute it "
            'over the replicas: BatchNorm(axis_name=("replica", "data")), or lax.pmean(x, ("replica", "data")).'
            + LEAVE_MICROBATCHES
            * (microbatches > 1),
        )
    if finding.boundary is not None:
        dim, index = finding.boundary
        return Diagnosis(
            "shard boundary",
            f"{where}; dim {dim} of it is right on one side of index {index} and wrong on the other",
            "What lies beyond a shard is missing or at the wrong place: a halo, a step of a ring, an offset of positions or of a vocabulary. "
            "Let sk.shard and the layout cut the value, or look at that op.",
        )
    if finding.num_wrong == 1 < finding.num_leaves:
        return Diagnosis(
            "one leaf",
            where,
            "Everything else is right, so look at where this leaf alone is used: a stop_gradient, a reduction of its own, a layout rule.",
        )
    axes = [a for a in mesh if a in MODEL_AXES]
    over = f"the model axes {', '.join(axes)}" if axes else "the replica axes"
    return Diagnosis(
        "other",
        where,
        f"The loss is another function on this mesh. What it computes over {over} by itself (collectives, shard_map, axis_index, the number "
        "of its rows) is the first place to look at.",
    )


def _diagnose_counts(
    found: float, expected: float, where: str, mesh: Mapping[str, int], microbatches: int, only_short: bool
) -> Diagnosis:
    counted = f"{where}; the loss counts {found:.6g}, on one device {expected:.6g}"
    if expected <= 1:
        return Diagnosis(
            "mean of means",
            counted,
            "The loss takes a mean itself and gives it to sk.mean as one value, so replicas and microbatches with unequal counts weigh the "
            "same. Give sk.mean the values: sk.mean(per_example_loss, where=mask).",
        )
    if only_short and found > expected:
        return Diagnosis(
            "duplicate padding",
            counted,
            "Rows that only fill up a short batch count as examples. Give sk.mean one value per example, or multiply by sk.example_mask().",
        )
    if reduced := _reduction_error(found / expected, mesh, microbatches):
        return Diagnosis(reduced[0], counted, reduced[2])
    return Diagnosis(
        "uneven counts",
        counted,
        "The count of the loss depends on how the batch is cut. It is the number of what is averaged, or the sum of its weights: "
        "sk.mean(values, where=, weights=) makes it.",
    )


def _where(finding: Difference) -> str:
    if finding.quantity == "loss":
        return f"the loss differs by {finding.error:.1e} ({finding.leaf})"
    leaves = (
        f"{finding.num_wrong} of {finding.num_leaves} leaves, the first is" if finding.num_wrong > 1 else "only leaf"
    )
    name = {"parameter": "parameters after the steps", "state": "model state"}.get(finding.quantity, finding.quantity)
    return f"{name} differs by {finding.error:.1e} ({leaves} '{finding.leaf}')"


def _reduction_error(factor: float | None, mesh: Mapping[str, int], microbatches: int) -> tuple[str, str, str] | None:
    """Returns (kind, found, repair) where the factor is one of the mesh's own numbers."""
    if factor is None:
        return None
    for names, size in _products(mesh, microbatches):
        if abs(factor / size - 1) < NEAR:
            found = f"the wrong leaves are {size} times the right ones, and {size} is the size of {names}"
            repair = f"A sum over {names} is made twice. sk.value_and_grad has already reduced: remove the other psum, pmean or factor."
            return "reduced twice", found, repair
        if abs(factor * size - 1) < NEAR:
            found = f"the wrong leaves are 1/{size} of the right ones, and {size} is the size of {names}"
            repair = f"A sum over {names} is missing, or its result is divided once more. Let sk.value_and_grad reduce."
            return "not reduced", found, repair
    return None


def _products(mesh: Mapping[str, int], microbatches: int) -> Iterable[tuple[str, int]]:
    """Yields (names, size) of every group of axes that a factor could come from, larger than one; the plainest
    first."""
    replicas = [(a, n) for a, n in mesh.items() if a in REPLICA_AXES and n > 1]
    others = [(a, n) for a, n in mesh.items() if a not in REPLICA_AXES and n > 1]
    groups: list[list[tuple[str, int]]] = []
    if replicas:
        groups.append(replicas)
    groups += [[pair] for pair in replicas + others]
    if microbatches > 1:
        groups += [[("microbatches", microbatches)], [*replicas, ("microbatches", microbatches)]]
    groups.append(replicas + others)
    for group in groups:
        size = 1
        for _, n in group:
            size *= n
        if size > 1:
            yield " x ".join(name for name, _ in group), size


def pattern(failed: Iterable[Mapping[str, Any]], passed: Iterable[Mapping[str, Any]]) -> str:
    """Returns what the failed cases have in common and no passed one has: `only with tensor > 1`, or an empty
    string."""
    bad, good = list(failed), list(passed)
    if not bad or not good:
        return ""
    tests: dict[str, Callable[[Mapping[str, Any]], bool]] = {
        f"only with {axis} > 1": (lambda case, axis=axis: case["mesh"].get(axis, 1) > 1)  # type: ignore[misc]
        for axis in (*REPLICA_AXES, *MODEL_AXES)
    }
    tests["only with accumulation"] = lambda case: case["microbatches"] > 1
    tests["only with several replicas"] = lambda case: any(case["mesh"].get(a, 1) > 1 for a in REPLICA_AXES)
    tests["only where the examples are cut"] = lambda case: any(
        case["mesh"].get(a, 1) > 1 for a in (*REPLICA_AXES, "fsdp", "expert")
    )
    fits = [words for words, test in tests.items() if all(map(test, bad)) and not any(map(test, good))]
    return fits[0] if fits else ""
