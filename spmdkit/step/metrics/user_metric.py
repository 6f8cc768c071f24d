"""User-defined metrics: a pytree of arrays with `merge(other)` and `compute()`, such as clu's metrics.

    @jax.tree_util.register_dataclass
    @dataclass
    class Variance:
        count: jax.Array
        mean: jax.Array
        squares: jax.Array

        def merge(self, other): ...      # the metric over the rows of both parts
        def compute(self): ...           # a number or an array

`merge` may be any function with the same result for every partition of the rows. The arrays hold this replica's rows.
The caller excludes padding (`sk.example_mask()`), including the case that all rows are padding.

Wire: a `merge` that only adds is sent with the means. Else an all_gather of the arrays over the replicas, (N-1) times
their bytes, in a step and in each evaluated batch. Every replica merges the parts in mesh order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import describe, first_difference
from spmdkit.step.metrics.base import Metric


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CustomMetric(Metric):
    """A part of a user-defined metric; `some`: int32[], 0 if it is still empty (its arrays are undefined)."""

    crosses: ClassVar[Literal["added", "merged"]] = "merged"
    part: Any
    some: jax.Array

    @property
    def value(self) -> Any:
        """The result of the user's `compute`: a number or an array."""
        return self.part.compute()

    def merge(self, other: CustomMetric) -> CustomMetric:
        def chosen(own: jax.Array, theirs: jax.Array, both: jax.Array) -> jax.Array:
            return jnp.where(self.some == 0, theirs, jnp.where(other.some == 0, own, both))

        both = self.part.merge(other.part)
        part = jax.tree.map(chosen, self.part, other.part, both)
        return dataclasses.replace(self, part=part, some=jnp.maximum(self.some, other.some))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AddedMetric(CustomMetric):
    """A part of a user-defined metric with a `merge` that adds each array."""

    crosses: ClassVar[Literal["added", "merged"]] = "added"


def is_user_metric(x: Any) -> bool:
    """Returns whether an object is a user-defined metric, i.e. has `merge` and `compute`."""
    return not isinstance(x, Metric) and all(callable(getattr(type(x), name, None)) for name in ("merge", "compute"))


def as_metric(x: Any, what: str) -> Any:
    """Returns a user-defined metric as a `Metric`, anything else unchanged. `what`: its name in messages.

    Raises:
        ConfigError: it is not a pytree of arrays, or `merge` or `compute` returns an unexpected value.
    """
    if not is_user_metric(x):
        return x
    name = type(x).__name__
    if jax.tree_util.all_leaves([x]):
        raise ConfigError(
            f"{what} is a {name}, which has merge and compute and is not a pytree. A user-defined metric is stored as "
            f"arrays. Write @jax.tree_util.register_dataclass above {name}."
        )
    part = jax.tree.map(jnp.asarray, x)
    both = jax.eval_shape(lambda a, b: a.merge(b), part, part)
    if difference := first_difference(part, both):
        raise ConfigError(
            f"{what}: merge of {name} returns a metric of another form than its input: {difference}. Parts of all rows "
            f"are merged one after the other, so shapes and dtypes stay the same. Return a {name} with the same "
            "arrays."
        )
    value = jax.eval_shape(lambda a: a.compute(), part)
    if not hasattr(value, "dtype"):
        raise ConfigError(
            f"{what}: compute of {name} returns {describe(value)}. A metric is one number or an array. Return several "
            "as separate metrics."
        )
    return (AddedMetric if _only_adds(part) else CustomMetric)(part, jnp.ones((), jnp.int32))


def _only_adds(part: Any) -> bool:
    """Returns whether each array of `part.merge(other)` is the sum of the same array of both."""
    own, other = (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), part) for _ in range(2))
    jaxpr = jax.make_jaxpr(lambda a, b: a.merge(b))(own, other).jaxpr
    added = {eqn.outvars[0]: set(eqn.invars) for eqn in jaxpr.eqns if eqn.primitive.name in ("add", "add_any")}
    pairs = zip(jaxpr.invars[: len(jaxpr.outvars)], jaxpr.invars[len(jaxpr.outvars) :], strict=True)
    return all(added.get(total) == set(pair) for total, pair in zip(jaxpr.outvars, pairs, strict=True))
