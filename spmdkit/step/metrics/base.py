"""`Metric`: what a metric is, a value in parts that merge: over microbatches, replicas, groups and the batches of an
evaluation.

sk.mean   (sum, count)    added       sk.max      the largest     largest
sk.sum    the total       added       sk.bincount   an array        added
sk.derived other metrics, or arrays that add, and a function of what all of them come to
a class of the user's own with `merge` and `compute` (user_metric.py): parts gathered, and merged one after the other
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

import jax
import jax.numpy as jnp

Self = TypeVar("Self", bound="Metric")
Tree = TypeVar("Tree")


class Metric(ABC):
    """A part of a metric, of some rows. A registered dataclass of arrays.

    Attributes:
        crosses: how parts of replicas become one, leaf by leaf: `added`, or the `largest`; `merge_trees`: by `merge` alone;
            `by part`: each of its parts as that says. `merge` does the same with two.
    """

    crosses: ClassVar[Literal["added", "largest", "merged", "by part"]] = "added"

    @property
    @abstractmethod
    def value(self) -> Any:
        """What is told, of all rows."""

    @abstractmethod
    def merge(self: Self, other: Self) -> Self:
        """Returns the metric of both parts' rows."""


def is_metric(x: Any) -> bool:
    return isinstance(x, Metric)


def _is_leaf(x: Any) -> bool:
    return is_metric(x) and x.crosses != "by part"


def merge_trees(own: Tree, other: Tree) -> Tree:
    """Returns two alike trees as one: metrics merged, every other leaf added."""
    one = lambda x, y: x.merge(y) if is_metric(x) else jnp.add(x, y)
    return jax.tree.map(one, own, other, is_leaf=_is_leaf)


def empty_parts(shapes: Tree, full: Callable[..., Any] = jnp.full) -> Tree:
    """Returns a tree of parts of no rows, which change nothing they are merged with. `shapes` has shapes and dtypes."""

    def zeros(x: Any) -> Any:
        return full(x.shape, 0, x.dtype)

    def lowest(x: Any) -> Any:
        return full(x.shape, -jnp.inf if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo(x.dtype).min, x.dtype)

    fill = lambda x: jax.tree.map(lowest if is_metric(x) and x.crosses == "largest" else zeros, x)
    return jax.tree.map(fill, shapes, is_leaf=_is_leaf)


def reduce_parts(
    tree: Tree, add: Callable[[Any], Any], largest: Callable[[Any], Any], gather: Callable[[Any], jax.Array]
) -> Tree:
    """Returns a tree of parts as those of all.

    Args:
        add: takes all that is added.
        largest: takes the maxima, where there are any.
        gather: takes one array of a metric that merges alone, and gives [parts, ...].
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_leaf)
    kind_of = lambda x: x.crosses if is_metric(x) else "added"
    for kind, cross in (("added", add), ("largest", largest)):
        if chosen := [i for i, x in enumerate(leaves) if kind_of(x) == kind]:
            for i, x in zip(chosen, cross([leaves[i] for i in chosen]), strict=True):
                leaves[i] = x
    one_by_one = [_merge_in_order(jax.tree.map(gather, x)) if kind_of(x) == "merged" else x for x in leaves]
    return jax.tree.unflatten(structure, one_by_one)  # type: ignore[no-any-return]


def _merge_in_order(parts: Any) -> Any:
    """Returns the metric of all of [parts, ...], merged in their order."""
    first, rest = (jax.tree.map(lambda x, of=of: x[of], parts) for of in (0, slice(1, None)))
    return jax.lax.scan(lambda total, part: (total.merge(part), None), first, rest)[0]
