"""How replicas agree on model state: what of each leaf crosses between them, and what they have afterwards.

    mean   sum_r new_r / N           floats; added in float32 or wider
    sum    old + sum_r (new_r - old) what each replica has added; integers modulo 2^bits
    max    max_r new_r
    identical  new_0                 what provably is the same on every replica, so that one of them speaks for all

Integers, booleans and random keys are never averaged. Where nothing is said (`Task.state_reduction`), a leaf that no
replica's rows change is `identical`, a float that is linear in its old value is a `mean`, and anything else is asked
for: the mean of maxima is no maximum.

Wire: the leaf, in the reduction that the gradient needs anyway; `max` in one of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest
from spmdkit.foundation.trees import common_dtype, describe, named_leaves
from spmdkit.step.model_state.dependence import dependence

Kind = Literal["mean", "sum", "max", "identical"]
KINDS: tuple[Kind, ...] = ("mean", "sum", "max", "identical")

Kinds = Mapping[str, Kind]
"""Path of a leaf of the model state -> how replicas agree on it."""


# ---- what is said, and what follows from the loss
# -----------------------------------------------------------------------


def declared_reductions(patterns: Mapping[str, str], state: Any) -> dict[str, Kind]:
    """Returns path -> kind for the leaves of a model state that the task speaks of; the first pattern that fits a whole
    path decides.

    Raises:
        ConfigError: a pattern fits no leaf, or a leaf cannot agree in that way.
    """
    leaves = named_leaves(state)
    said: dict[str, Kind] = {}
    for pattern, kind in patterns.items():
        fitting = [(path, leaf) for path, leaf in leaves if re.fullmatch(pattern, path)]
        if not fitting:
            paths = [path for path, _ in leaves]
            found = f"The model state has {', '.join(paths[:8])}" if paths else "There is no model state"
            raise ConfigError(
                f"Task.state_reduction: '{pattern}' fits no leaf. {found}.{nearest(pattern, paths)} Remove it, or "
                "name a leaf."
            )
        for path, leaf in fitting:
            _check_kind(path, leaf.dtype, kind)
            said.setdefault(path, kind)  # type: ignore[arg-type]
    return said


def _check_kind(path: str, dtype: Any, kind: str) -> None:
    number = jnp.issubdtype(dtype, jnp.number)
    if kind == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        raise ConfigError(
            f"Task.state_reduction says mean for model state '{path}', which is {dtype}. Integers, booleans and keys "
            f"are never averaged. Say {'sum, max or identical' if number else 'identical'}."
        )
    if kind == "max" and jnp.issubdtype(dtype, jnp.complexfloating):
        raise ConfigError(
            f"Task.state_reduction says max for model state '{path}', which is {dtype}. Complex numbers have no "
            "order. Say mean, sum or identical."
        )
    if kind in ("sum", "max") and not number:
        raise ConfigError(
            f"Task.state_reduction says {kind} for model state '{path}', which is {dtype}. Only numbers have one. Say "
            "identical."
        )


def state_reductions(
    said: Kinds,
    one_replica: Callable[..., Any],
    state: Any,
    shared: Any,
    own: Sequence[Any],
    axes: Sequence[tuple[str, int]],
    bound: bool,
) -> dict[str, Kind]:
    """Returns how replicas agree on each leaf of a model state, and asks where the loss does not tell.

    Args:
        said: what the task says, for some leaves.
        one_replica: `(state, shared, own) -> new state` of one replica.
        state, shared: abstract; the model state, and what else is the same on every replica.
        own: abstract, what a replica has for itself (rows, mask, key); then the same with another number of rows, which
            shows what depends on that number.
        axes: names and sizes of the replica axes.
        bound: whether these names are bound where this is called.

    Raises:
        ConfigError: a leaf changes by a replica's rows in a way that has no mean, and nothing is said; or what is said
            to be the same is not.
    """
    leaves = named_leaves(state)
    num = len(leaves)
    rows = 1 << num
    make = lambda *given: compat.jaxpr_with_axes(one_replica, () if bound else axes)(state, shared, *given)
    traced = make(own[0])
    inputs = [1 << i for i in range(num)] + [0] * len(jax.tree.leaves(shared))
    inputs += [rows] * (len(traced.jaxpr.invars) - len(inputs))
    found = dependence(traced, inputs, rows, [name for name, size in axes if size > 1])
    kinds: dict[str, Kind] = {}
    counting = []
    for i, ((path, leaf), depends) in enumerate(zip(leaves, found, strict=True)):
        inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        by_rows = bool(depends.all & rows)
        if path in said:
            if said[path] == "identical" and by_rows:
                raise ConfigError(_not_identical(path, leaf))
            kinds[path] = said[path]
        elif not by_rows:
            kinds[path] = "identical"
            counting += [i] * (not inexact)
        elif inexact and not depends.other & (1 << i):
            kinds[path] = "mean"
        else:
            raise ConfigError(_undecided(path, leaf, "by the rows or the key of a replica"))
    if counting and (other := _trace_or_none(lambda: make(own[1]))) is not None:
        for i in counting:
            if compat.jaxpr_of_result(traced, i) != compat.jaxpr_of_result(other, i):
                raise ConfigError(_undecided(*leaves[i], "by the number of rows of a replica"))
    return kinds


def _trace_or_none(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception:  # noqa: BLE001 - a loss that is written for one number of rows: nothing to compare
        return None


def _undecided(path: str, leaf: Any, how: str) -> str:
    what = f"loss_fn changes model state '{path}' ({describe(leaf)}) {how}"
    if not jnp.issubdtype(leaf.dtype, jnp.number):
        return (
            f"{what}. Replicas would disagree, and it has no mean. Make it the same on all of them in the loss, with "
            "lax.pmax or lax.psum over ('replica', 'data'), or compute it from what they share."
        )
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return (
            f"{what}, not linearly in its old value, so the mean over replicas may be wrong. Say how they agree: "
            f"Task(state_reduction={{'{path}': 'max'}}), 'mean', 'sum' (what each replica adds), or 'identical' after "
            "a reduction of your own."
        )
    return (
        f"{what}. Integers are never averaged. Say how replicas agree: Task(state_reduction={{'{path}': 'sum'}}) "
        "(what each replica adds), 'max', or 'identical' after a reduction of your own."
    )


def _not_identical(path: str, leaf: Any) -> str:
    return (
        f"Task.state_reduction says that model state '{path}' ({describe(leaf)}) is the same on every replica, and "
        "loss_fn computes it from a replica's own rows or key. Reduce it in the loss over ('replica', 'data') "
        "(lax.pmean, lax.psum, lax.pmax), or say mean, sum or max."
    )


# ---- what crosses -------------------------------------------------------------------------------------------------------


def values_to_reduce(
    kinds: Kinds, old: Any, new: Any, first: jax.Array
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Returns (what is added, what the largest is taken of) over replicas, by path.

    Shapes: leaves of `new` are [*replicas, ...] with `first` bool[*replicas], True on one of them; those of `old`
        [...].
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
            largest[path] = x
        else:
            bits = _bits(x)
            added[path] = jnp.where(
                first.reshape(first.shape + (1,) * (bits.ndim - first.ndim)), bits, jnp.zeros_like(bits)
            )
    return added, largest


def reduced_state(
    kinds: Kinds, old: Any, new: Any, added: Mapping[str, jax.Array], largest: Mapping[str, jax.Array], num: int
) -> Any:
    """Returns the model state of all `num` replicas from what has crossed; `new` says of which dtypes it is."""
    before = dict(named_leaves(old))

    def leaf(path: str, like: Any) -> jax.Array:
        kind = kinds[path]
        if kind == "max":
            return largest[path]
        if kind == "identical":
            return _from_bits(added[path], like)
        total = added[path] / num if kind == "mean" else _wide(before[path]) + added[path]
        return total.astype(like.dtype)

    return jax.tree.unflatten(jax.tree.structure(new), [leaf(path, like) for path, like in named_leaves(new)])


def reduce_by_group(kinds: Kinds, old: Any, new: Any, groups: int) -> Any:
    """Returns [groups, ...] from the state of all replicas [replicas, ...]: each group of neighbours agrees; `old` is
    [groups, ...]."""
    before = dict(named_leaves(old))

    def leaf(path: str, x: jax.Array) -> jax.Array:
        grouped = x.reshape(groups, -1, *x.shape[1:])
        kind, size = kinds[path], grouped.shape[1]
        if size == 1 or kind == "identical":
            return grouped[:, 0]
        if kind == "max":
            return grouped.max(1)
        if kind == "mean":
            return (_wide(grouped).sum(1) / size).astype(x.dtype)
        start = _wide(before[path])
        return (start + (_wide(grouped) - start[:, None]).sum(1, dtype=start.dtype)).astype(x.dtype)

    return jax.tree.unflatten(jax.tree.structure(new), [leaf(path, x) for path, x in named_leaves(new)])


def merge_groups(said: Kinds, state: Any) -> Any:
    """Returns one state [...] from those of the groups [groups, ...], for an evaluation.

    Floats are averaged, or as the task says. A `sum` is that of all groups, which is what a counter that began at zero
    would be on one device. Of anything else the first group's is taken.
    """

    def leaf(path: str, x: jax.Array) -> jax.Array:
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        kind = said.get(path, "mean" if inexact else "identical")
        if kind == "identical":
            return x[0]
        if kind == "max":
            return x.max(0)
        if kind == "sum":
            return x.sum(0, dtype=_wide(x).dtype).astype(x.dtype)
        return _wide(x).mean(0).astype(x.dtype)

    return jax.tree.unflatten(jax.tree.structure(state), [leaf(path, x) for path, x in named_leaves(state)])


def _wide(x: jax.Array) -> jax.Array:
    """Returns floats in float32 or wider, integers as they are."""
    return x.astype(common_dtype(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _bits(x: jax.Array) -> jax.Array:
    """Returns an array that can be added to zeros and comes back as it was."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x.astype(jnp.uint8) if x.dtype == bool else _wide(x)


def _from_bits(bits: jax.Array, like: jax.Array) -> jax.Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(like))
    return bits.astype(like.dtype)


SEAMS = {"crossing": values_to_reduce, "agreed": reduced_state}
"""What `verify` replaces (verify/mutations.py)."""
