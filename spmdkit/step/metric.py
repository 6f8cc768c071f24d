"""`Metric`: what a metric is, a value in parts that merge: over microbatches, replicas, groups and the batches of an evaluation.

sk.mean   (sum, count)    added       sk.max      the largest     largest
sk.sum    the total       added       sk.counts   an array        added
sk.finish other metrics, or arrays that add, and a function of what all of them come to
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
        crosses: how parts of replicas become one, leaf by leaf: `added`, or the `largest`; `by part`: each of its parts as that says.
            `merge` does the same with two.
    """

    crosses: ClassVar[Literal["added", "largest", "by part"]] = "added"

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


def merged(own: Tree, other: Tree) -> Tree:
    """Returns two alike trees as one: metrics merged, every other leaf added."""
    one = lambda x, y: x.merge(y) if is_metric(x) else jnp.add(x, y)
    return jax.tree.map(one, own, other, is_leaf=_is_leaf)


def nothing(shapes: Tree, full: Callable[..., Any] = jnp.full) -> Tree:
    """Returns a tree of parts of no rows, which change nothing they are merged with. `shapes` has shapes and dtypes."""

    def zeros(x: Any) -> Any:
        return full(x.shape, 0, x.dtype)

    def lowest(x: Any) -> Any:
        return full(x.shape, -jnp.inf if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo(x.dtype).min, x.dtype)

    fill = lambda x: jax.tree.map(lowest if is_metric(x) and x.crosses == "largest" else zeros, x)
    return jax.tree.map(fill, shapes, is_leaf=_is_leaf)


def crossed(tree: Tree, add: Callable[[Any], Any], largest: Callable[[Any], Any]) -> Tree:
    """Returns a tree of parts as those of all: `add` takes all that is added, `largest` the maxima where there are any."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_leaf)
    maxima = [i for i, x in enumerate(leaves) if is_metric(x) and x.crosses == "largest"]
    sums = [i for i in range(len(leaves)) if i not in maxima]
    for chosen, cross in ((sums, add), (maxima, largest)):
        if chosen:
            for i, x in zip(chosen, cross([leaves[i] for i in chosen]), strict=True):
                leaves[i] = x
    return jax.tree.unflatten(structure, leaves)  # type: ignore[no-any-return]
