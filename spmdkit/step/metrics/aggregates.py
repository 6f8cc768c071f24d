"""`sk.sum`, `sk.max`, `sk.bincount`, and `sk.derived` of any metrics. None of them can be used as a loss.

Wire: for `sk.max` one more all-reduce of two numbers in each step and evaluated batch, for `sk.bincount` one of its
integers. A sum is sent with the means.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from spmdkit.errors import ConfigError
from spmdkit.step.metrics.base import Metric, is_metric, merge_trees
from spmdkit.step.metrics.mean import as_float, broadcast, inclusion_mask
from spmdkit.step.metrics.user_metric import CustomMetric, as_metric


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sum(Metric):
    """A total, float32[] (float64 for float64 values)."""

    total: jax.Array

    @property
    def value(self) -> jax.Array:
        return self.total

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Max(Metric):
    """The largest value, float32[] (float64 for float64 values). Minus infinity without values; NaN if any value is
    NaN.

    `broken` is positive if there was a NaN: XLA's all-reduce of a maximum drops NaNs (CPU, jaxlib 0.10.2).
    """

    crosses: ClassVar[Literal["added", "largest"]] = "largest"
    largest: jax.Array
    broken: jax.Array

    @property
    def value(self) -> jax.Array:
        return jnp.where(self.broken > 0, jnp.nan, self.largest)

    def merge(self, other: Max) -> Max:
        return Max(jnp.maximum(self.largest, other.largest), jnp.maximum(self.broken, other.broken))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bincount(Metric):
    """The number of occurrences of each index, int32[*shape]; float32 (or float64) with weights."""

    counts: jax.Array

    @property
    def value(self) -> jax.Array:
        return self.counts

    def merge(self, other: Bincount) -> Bincount:
        return Bincount(self.counts + other.counts)


class _DerivedFunction:
    """The function of a `Derived`. All instances are equal: a loss creates a new one in every trace."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DerivedFunction)

    def __hash__(self) -> int:
        return hash(_DerivedFunction)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("parts",), meta_fields=("function",))
@dataclass(frozen=True)
class Derived(Metric):
    """A function of the totals of metrics, or of arrays that are added."""

    crosses: ClassVar[Literal["by part"]] = "by part"
    parts: tuple[Any, ...]
    function: _DerivedFunction

    @property
    def value(self) -> Any:
        """The result of the function: a number or an array."""
        return self.function.fn(*map(_part_value, self.parts))

    def merge(self, other: Derived) -> Derived:
        return Derived(merge_trees(self.parts, other.parts), self.function)


def _part_value(part: Any) -> Any:
    """Returns the function's argument for a part: the value of a metric, anything else unchanged."""
    return part.part if isinstance(part, CustomMetric) else part.value if is_metric(part) else part


def derived(fn: Callable[..., Any], *parts: Any) -> Derived:
    """Returns the metric `fn(*parts)`, computed once from the totals of the parts over all rows, microbatches, replicas
    and batches.

    Perplexity is `sk.derived(jnp.exp, sk.mean(losses))`; per-class accuracy is `sk.derived(lambda c: jnp.diag(c) /
    c.sum(1), sk.bincount((labels, predictions), (10, 10)))`.

    Args:
        fn: maps the values of the parts to a number or an array. JAX or numpy.
        parts: metrics; instances of a class with `merge` and `compute` (user_metric.py); or pytrees of arrays to add
            (totals and counts). For the latter two the caller excludes padding rows (`sk.example_mask()`).

    Raises:
        ConfigError: there are no parts, or a part cannot be merged.
    """
    if not parts or not jax.tree.leaves(parts):
        raise ConfigError(
            "sk.derived got a function and no parts. A metric is derived from parts that add up. Write "
            "sk.derived(jnp.exp, sk.mean(losses))."
        )
    converted = (as_metric(part, "a part of sk.derived") for part in parts)
    arrays = (part if is_metric(part) else jax.tree.map(jnp.asarray, part) for part in converted)
    return Derived(tuple(arrays), _DerivedFunction(fn))


def sum(values: ArrayLike, where: ArrayLike | None = None) -> Sum:
    """Returns the sum of `values` over this replica's examples; parts are added. Padding and `where` as in
    `sk.mean`."""
    values = as_float(values)
    included = inclusion_mask("sk.sum", values, where)
    return Sum(values.sum() if included is None else jnp.where(included, values, 0).sum())


def max(values: ArrayLike, where: ArrayLike | None = None) -> Max:
    """Returns the maximum of `values` over this replica's examples. Padding and `where` as in `sk.mean`."""
    values = as_float(values)
    included = inclusion_mask("sk.max", values, where)
    values = values if included is None else jnp.where(included, values, -jnp.inf)
    is_nan = jnp.isnan(values)
    return Max(jnp.where(is_nan, -jnp.inf, values).max(initial=-jnp.inf), is_nan.astype(values.dtype).max(initial=0))


def bincount(
    indices: ArrayLike | Sequence[ArrayLike],
    shape: int | Sequence[int],
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> Bincount:
    """Returns the number of occurrences of each index in this replica's examples: a histogram, a confusion matrix.

    `sk.bincount(labels, 10)` is [10], `sk.bincount((labels, predictions), (10, 10))` is [10, 10]. Indices out of range
    are not counted. Counts are exact up to 2**31 - 1 per index and batch, and up to 2**63 - 1 over an evaluation.

    Args:
        indices: integers of any shape, or a tuple of such arrays of equal shape: one for each dim. Padding and `where`
            as in `sk.mean`.
        shape: shape of the counts.
        weights: float; broadcast from the left to the indices.

    Raises:
        ConfigError: the indices are not integers, or there is not exactly one array per dim.
    """
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    parts = [jnp.asarray(x) for x in (indices if isinstance(indices, tuple | list) else (indices,))]
    if len(parts) != len(dims) or any(x.shape != parts[0].shape for x in parts):
        raise ConfigError(
            f"sk.bincount: indices of shapes {[x.shape for x in parts]} for counts of shape {dims}. It takes one "
            "array of indices for each dim, all of one shape. Write sk.bincount(labels, 10), or sk.bincount((labels, "
            "predictions), (10, 10))."
        )
    if wrong := [str(x.dtype) for x in parts if not jnp.issubdtype(x.dtype, jnp.integer)]:
        raise ConfigError(
            f"sk.bincount: indices of dtype {wrong[0]}. An index is an integer. Round first: "
            "jnp.floor(x).astype(jnp.int32)."
        )
    padded = inclusion_mask("sk.bincount", parts[0], where)
    included = jnp.ones(parts[0].shape, bool) if padded is None else padded
    for x, length in zip(parts, dims, strict=True):
        included = included & (x >= 0) & (x < length)
    amounts = jnp.ones((), jnp.int32) if weights is None else as_float(weights)
    counted = jnp.where(included, broadcast("sk.bincount: weights", amounts, parts[0]), jnp.zeros((), amounts.dtype))
    positions = tuple(jnp.clip(x, 0, length - 1) for x, length in zip(parts, dims, strict=True))
    return Bincount(jnp.zeros(dims, amounts.dtype).at[positions].add(counted))
