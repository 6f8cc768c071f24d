"""`Metric`: a value in parts that merge over microbatches, replicas, groups and the batches of an evaluation.

sk.mean   (sum, count)    added       sk.max      the largest     largest
sk.sum    the total       added       sk.bincount   an array        added
sk.derived   a function of the totals of other metrics, or of arrays that are added
a user-defined class with `merge` and `compute` (user_metric.py): parts are gathered and merged in order
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Self = TypeVar("Self", bound="Metric")
Tree = TypeVar("Tree")


class Metric(ABC):
    """The part of a metric for some of the rows. A registered dataclass of arrays.

    Attributes:
        crosses: how parts are combined over replicas, leaf by leaf. `added`; `largest`; `merged`: by `merge` only; or
            `by part`: each component by its own rule. `merge` combines two parts.
    """

    crosses: ClassVar[Literal["added", "largest", "merged", "by part"]] = "added"

    @property
    @abstractmethod
    def value(self) -> Any:
        """The reported value, over all rows."""

    @abstractmethod
    def merge(self: Self, other: Self) -> Self:
        """Returns the metric over the rows of both parts."""


def is_metric(x: Any) -> bool:
    return isinstance(x, Metric)


def _is_leaf(x: Any) -> bool:
    return is_metric(x) and x.crosses != "by part"


def merge_trees(own: Tree, other: Tree) -> Tree:
    """Returns the combination of two trees of the same structure: metrics are merged, other leaves added."""
    merged = lambda x, y: x.merge(y) if is_metric(x) else jnp.add(x, y)
    return jax.tree.map(merged, own, other, is_leaf=_is_leaf)  # type: ignore[no-any-return]


def is_added(x: Any) -> bool:
    """Returns whether parts of a metric, or arrays outside of metrics, are combined by addition alone."""
    return not is_metric(x) or x.crosses == "added"


def merge_next_batch(before: Tree, part: Tree) -> Tree:
    """Returns the metrics of all batches so far; what is added is returned for the new batch alone: `add_on_host`."""
    merged = lambda x, y: y if is_added(x) else x.merge(y)
    return jax.tree.map(merged, before, part, is_leaf=_is_leaf)  # type: ignore[no-any-return]


def add_on_host(total: Tree, part: Tree) -> Tree:
    """Returns numpy arrays: the sums that include `part` in 64 bits, and the merged metrics of `part`.

    Sums in float32 drift over thousands of batches: whole numbers are exact up to 2**24 only.
    """
    added = lambda x, y: np.add(x, y, dtype=_wide(y.dtype))
    combined = lambda x, y: jax.tree.map(added, x, y) if is_added(x) else y
    return jax.tree.map(combined, total, jax.device_get(part), is_leaf=_is_leaf)  # type: ignore[no-any-return]


def _wide(dtype: Any) -> Any:
    kinds = {jnp.floating: "f8", jnp.complexfloating: "c16", jnp.unsignedinteger: "u8", jnp.signedinteger: "i8"}
    return next((np.dtype(wide) for kind, wide in kinds.items() if jnp.issubdtype(dtype, kind)), dtype)


def empty_parts(shapes: Tree, full: Callable[..., Any] = jnp.full) -> Tree:
    """Returns a tree of empty parts, the neutral element of merging. `shapes` has shapes and dtypes."""

    zeros = lambda x: full(x.shape, 0, x.dtype)
    least: Callable[[Any], Any] = lambda dtype: -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min
    lowest = lambda x: full(x.shape, least(x.dtype), x.dtype)
    fill = lambda x: jax.tree.map(lowest if is_metric(x) and x.crosses == "largest" else zeros, x)
    return jax.tree.map(fill, shapes, is_leaf=_is_leaf)  # type: ignore[no-any-return]


def reduce_parts(
    tree: Tree, add: Callable[[Any], Any], largest: Callable[[Any], Any], gather: Callable[[Any], jax.Array]
) -> Tree:
    """Returns a tree of parts combined over replicas or groups.

    Args:
        add: sums values.
        largest: returns the maximum of values; called only if there are any.
        gather: maps an array of a metric that supports only `merge` to [parts, ...].
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_leaf)
    kind_of: Callable[[Any], str] = lambda x: x.crosses if is_metric(x) else "added"
    for kind, cross in (("added", add), ("largest", largest)):
        if chosen := [i for i, x in enumerate(leaves) if kind_of(x) == kind]:
            for i, x in zip(chosen, cross([leaves[i] for i in chosen]), strict=True):
                leaves[i] = x
    one_by_one = [_merge_in_order(jax.tree.map(gather, x)) if kind_of(x) == "merged" else x for x in leaves]
    return jax.tree.unflatten(structure, one_by_one)  # type: ignore[no-any-return]


def _merge_in_order(parts: Any) -> Any:
    first, rest = (jax.tree.map(lambda x, of=of: x[of], parts) for of in (0, slice(1, None)))
    return jax.lax.scan(lambda total, part: (total.merge(part), None), first, rest)[0]
