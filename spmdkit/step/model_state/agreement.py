"""The reduction of model state over replicas: the values sent for each leaf, and the result.

    mean       sum_r new_r / N            floats; added in float32 or wider
    sum        old + sum_r (new_r - old)  the increments of all replicas; integers modulo 2^bits
    max        max_r new_r
    identical  new_0                      provably the same on every replica
    unchanged  old                        the loss returns the leaf as it was: never declared, and nothing is sent

Without `Task.state_reduction`, a leaf that does not depend on a replica's rows is `identical`, and a float that is
linear in its old value is a `mean`. Every other leaf must be declared: the mean of maxima is not a maximum.

Wire: the leaf, in the same reduction as the gradient; `max` in a separate reduction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest
from spmdkit.foundation.trees import common_dtype, describe, is_key, is_narrow, named_leaves
from spmdkit.step.dataflow.analysis import Usage

Kind = Literal["mean", "sum", "max", "identical", "unchanged"]
KINDS: tuple[Kind, ...] = ("mean", "sum", "max", "identical")
"""The reductions that a task can declare."""

Kinds = Mapping[str, Kind]
"""Path of a model state leaf -> its reduction over replicas."""


# ---- declared and derived reductions


def declared_reductions(patterns: Mapping[str, str], state: Any) -> dict[str, Kind]:
    """Returns path -> kind for the model state leaves that the task declares; the first pattern that matches the full
    path applies. Raises ConfigError for a pattern without a matching leaf, or a leaf without that reduction."""
    leaves = named_leaves(state)
    declared: dict[str, Kind] = {}
    for pattern, kind in patterns.items():
        fitting = [(path, leaf) for path, leaf in leaves if re.fullmatch(pattern, path)]
        if not fitting:
            paths = [path for path, _ in leaves]
            found = f"The model state has {', '.join(paths[:8])}" if paths else "There is no model state"
            raise ConfigError(
                f"Task.state_reduction: '{pattern}' matches no leaf. {found}.{nearest(pattern, paths)} Remove it, or "
                "name a leaf."
            )
        for path, leaf in fitting:
            _check_kind(path, leaf.dtype, kind)
            declared.setdefault(path, kind)  # type: ignore[arg-type]
    return declared


def _check_kind(path: str, dtype: Any, kind: str) -> None:
    number, what = jnp.issubdtype(dtype, jnp.number), f"Task.state_reduction is {kind} for model state '{path}', which"
    if kind == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        repair = "sum, max or identical" if number else "identical"
        raise ConfigError(f"{what} is {dtype}. Integers, booleans and keys are never averaged. Write {repair}.")
    if kind == "max" and jnp.issubdtype(dtype, jnp.complexfloating):
        raise ConfigError(f"{what} is {dtype}. Complex numbers have no order. Write mean, sum or identical.")
    if kind in ("sum", "max") and not number:
        raise ConfigError(f"{what} is {dtype}. It is defined for numbers only. Write identical.")


def state_reductions(declared: Kinds, leaves: Sequence[tuple[str, Any]], usages: Sequence[Usage]) -> dict[str, Kind]:
    """Returns the reduction of each leaf of a model state: declared, or derived from the loss.

    Args:
        leaves: (path, leaf) of the model state.
        usages: how rows enter; includes an item of each leaf.

    Raises:
        ConfigError: an undeclared leaf depends on a replica's rows and has no derived reduction, or a leaf is wrongly
            `identical`.
    """
    found = {usage.name: usage for usage in usages if usage.what == "model state"}
    return {path: _reduction(declared, path, leaf, found.get(path)) for path, leaf in leaves}


def _reduction(declared: Kinds, path: str, leaf: Any, usage: Usage | None) -> Kind:
    if usage is not None and usage.unchanged:
        return "unchanged"
    if usage is None:  # the trace of the step reports why the loss cannot be traced
        return declared.get(path, "identical")
    if path in declared:
        if declared[path] == "identical" and usage.per_replica:
            raise ConfigError(_not_identical(path, leaf))
        if declared[path] == "sum" and usage.factor not in (None, 1):
            raise ConfigError(_not_added(path, leaf, usage.factor))
        return declared[path]
    if (kind := reduction_of(usage)) is not None:
        return kind
    if not usage.per_replica:
        raise ConfigError(_undecided(path, leaf, usage, "by the number of rows of a replica"))
    how = f"by the rows or the key of a replica{_HOW.get(usage.flow.how, '')}"
    raise ConfigError(_undecided(path, leaf, usage, how))


def reduction_of(usage: Usage) -> Kind | None:
    """Returns the reduction that follows from how rows and the old value enter a leaf, or None."""
    flow = usage.flow
    if usage.unchanged:
        return "unchanged"
    if not usage.per_replica and not usage.counted:
        return "identical"
    if usage.old == "retained" and flow.degree == 1 and flow.how in ("none", "total") and not flow.mixed:
        return "sum"
    averaged = flow.how in ("none", "unknown") or (flow.how in ("total", "moment") and flow.degree == 0)
    return "mean" if usage.per_replica and usage.inexact and usage.old != "other" and averaged else None


_HOW = {
    "row": ", with values of single rows",
    "total": ", as a sum",
    "moment": ", as a product of sums",
    "max": ", as a maximum",
    "min": ", as a minimum",
    "other": ", by their order or as another function of several rows",
}


def _undecided(path: str, leaf: Any, usage: Usage, how: str) -> str:
    what = f"loss_fn changes model state '{path}' ({describe(leaf)}) {how}"
    if not jnp.issubdtype(leaf.dtype, jnp.number):
        return (
            f"{what}. Replicas would diverge, and it has no mean. Make it the same on all of them in the loss, with "
            "lax.pmax or lax.psum over ('replica', 'data'), or compute it from values that they share."
        )
    added = "'sum' (the increments of all replicas), " if usage.factor in (None, 1) else ""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return (
            f"{what}. The mean over replicas may be wrong: it is derived only for a leaf that is linear in its old "
            "value and in a mean over rows. Use the rows of all replicas (sk.all_gather(x), sk.psum(x)), or declare "
            f"its reduction: Task(state_reduction={{'{path}': 'mean'}}), 'max', {added}or 'identical' after a "
            "reduction in the loss."
        )
    return (
        f"{what}. Integers are never averaged. Declare its reduction: Task(state_reduction={{'{path}': 'max'}}), "
        f"{added}or 'identical' after a reduction in the loss."
    )


def _not_added(path: str, leaf: Any, factor: float | None) -> str:
    return (
        f"Task.state_reduction is sum for model state '{path}' ({describe(leaf)}), and loss_fn multiplies its old "
        f"value by {factor:.3g}. A sum adds the increments of all replicas, new - old, so the old value must enter "
        "with factor 1: old + added. Add the parts of all replicas in the loss (sk.psum(x)), and remove the entry."
    )


def _not_identical(path: str, leaf: Any) -> str:
    return (
        f"Task.state_reduction is identical for model state '{path}' ({describe(leaf)}), and loss_fn computes it from "
        "a replica's own rows or key. Reduce it in the loss over ('replica', 'data') (lax.pmean, lax.psum, "
        "lax.pmax), or write mean, sum or max."
    )


# ---- communication


def values_to_reduce(
    kinds: Kinds, old: Any, new: Any, first: jax.Array
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Returns (path -> value to sum, path -> value to take the maximum of) over replicas.

    Shapes: leaves of `new` are [*replicas, ...], leaves of `old` [...]; `first`: bool[*replicas], True on one replica.
    """
    added, largest = {}, {}
    before = dict(named_leaves(old))
    for path, x in named_leaves(new):
        kind = kinds[path]
        if kind == "mean":
            added[path] = _wide(x)
        elif kind == "sum":
            added[path] = _wide(x) - _wide(before[path])
        elif kind == "max":
            largest[path] = _wide(x)
        elif kind == "identical":
            bits = _bits(x)
            is_first = first.reshape(first.shape + (1,) * (bits.ndim - first.ndim))
            added[path] = jnp.where(is_first, bits, jnp.zeros_like(bits))
    return added, largest


def reduced_state(
    kinds: Kinds, old: Any, new: Any, added: Mapping[str, jax.Array], largest: Mapping[str, jax.Array], num: int
) -> Any:
    """Returns the model state of all `num` replicas from the reduced values; `new` provides the dtypes."""
    before = dict(named_leaves(old))

    def leaf(path: str, like: Any) -> jax.Array:
        kind = kinds[path]
        if kind == "max":
            return largest[path].astype(like.dtype)
        if kind == "unchanged":
            return before[path]  # type: ignore[no-any-return]
        if kind == "identical":
            return _from_bits(added[path], like)
        total = added[path] / num if kind == "mean" else _wide(before[path]) + added[path]
        return total.astype(like.dtype)

    return jax.tree.unflatten(jax.tree.structure(new), [leaf(path, like) for path, like in named_leaves(new)])


def reduce_by_group(kinds: Kinds, old: Any, new: Any, groups: int) -> Any:
    """Returns [groups, ...] from the state of all replicas [replicas, ...]. `old` is [groups, ...]."""
    before = dict(named_leaves(old))

    def leaf(path: str, x: jax.Array) -> jax.Array:
        grouped = x.reshape(groups, len(x) // groups, *x.shape[1:])
        kind, size = kinds[path], grouped.shape[1]
        if size == 1 or kind in ("identical", "unchanged"):
            return grouped[:, 0]
        if kind == "max":
            return grouped.max(1)
        if kind == "mean":
            return (_wide(grouped).sum(1) / size).astype(x.dtype)
        start = _wide(before[path])
        return (start + (_wide(grouped) - start[:, None]).sum(1, dtype=start.dtype)).astype(x.dtype)

    return jax.tree.unflatten(jax.tree.structure(new), [leaf(path, x) for path, x in named_leaves(new)])


def merge_groups(declared: Kinds, state: Any) -> Any:
    """Returns one state [...] for an evaluation from the states of the groups [groups, ...]: reduced as declared (`sum`
    is over all groups), otherwise the mean for floats and the first group's value for other leaves."""

    def leaf(path: str, x: jax.Array) -> jax.Array:
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        kind = declared.get(path, "mean" if inexact else "identical")
        if kind == "identical":
            return x[0]
        if kind == "max":
            return x.max(0)
        if kind == "sum":
            return x.sum(0, dtype=_wide(x).dtype).astype(x.dtype)
        return _wide(x).mean(0).astype(x.dtype)

    return jax.tree.unflatten(jax.tree.structure(state), [leaf(path, x) for path, x in named_leaves(state)])


def _wide(x: jax.Array) -> jax.Array:
    """Returns floats in float32 or wider, and int4 in int8: XLA:CPU adds no int2 over devices."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(common_dtype(x.dtype, jnp.float32))
    return x.astype(jnp.int8) if is_narrow(x.dtype) else x


def _bits(x: jax.Array) -> jax.Array:
    """Returns an array that can be summed with zeros without loss."""
    if is_key(x):
        return jax.random.key_data(x)
    return x.astype(jnp.uint8) if x.dtype == bool else _wide(x)


def _from_bits(bits: jax.Array, like: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(like)) if is_key(like) else bits.astype(like.dtype)


SEAMS = {"crossing": values_to_reduce, "agreed": reduced_state}
"""Functions that `verify` replaces to inject mistakes (verify/mutations.py)."""
