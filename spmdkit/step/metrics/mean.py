"""`sk.mean`: a mean that is a pair (sum, count) until all parts have been added, and is divided once.

    mean over everything = sum_r sum_m sum_i w_i x_i / sum_r sum_m sum_i w_i      (replica r, microbatch m, example i)

A mean of means is wrong if the counts differ. A pair is correct for a short last batch, uneven token counts,
microbatches, replicas, hosts and the batches of an evaluation.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import common_dtype
from spmdkit.mesh.mesh import REPLICA_AXES
from spmdkit.step import rng, trace_context
from spmdkit.step.metrics.base import Metric

T = TypeVar("T", bound="_Arithmetic")


class _Arithmetic(Metric):
    @abstractmethod
    def __add__(self, other: Any) -> Any: ...

    @abstractmethod
    def _with_sums(self: T, change: Callable[[jax.Array], jax.Array]) -> T:
        """Returns the metric with `change` applied to each sum."""

    def __radd__(self, other: Any) -> Any:
        return self + other

    def __sub__(self, other: Any) -> Any:
        return self + (-other)

    def __rsub__(self, other: ArrayLike) -> Any:
        return -self + other

    def __mul__(self: T, factor: ArrayLike) -> T:
        return self._with_sums(lambda total: total * _scalar(factor))

    def __rmul__(self: T, factor: ArrayLike) -> T:
        return self * factor

    def __truediv__(self: T, divisor: ArrayLike) -> T:
        return self._with_sums(lambda total: total / _scalar(divisor))

    def __neg__(self: T) -> T:
        return self._with_sums(lambda total: -total)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean(_Arithmetic):
    """A weighted mean as the pair (sum, count), both float32 scalars (float64 for float64 values).

    `mean * 2`, `mean / 2` and `-mean` scale it. `mean + s` adds a scalar to the value (a regularization term), once for
    any number of replicas and microbatches. `mean + other` is a `Means`. `.merge` pools two parts of the same mean.

    A count that depends only on shapes is a numpy number, so reductions multiply it instead of adding. With weights,
    `count` is the sum of the weights and `num` the number of elements: a mean with weights that cancel is not empty.
    """

    sum: jax.Array
    count: jax.Array | np.floating
    num: jax.Array | np.floating | None = None

    @property
    def divisor(self) -> jax.Array:
        """The divisor of `sum`: the count, or one if no elements were counted."""
        return jnp.where((self.count if self.num is None else self.num) == 0, 1, self.count)

    @property
    def value(self) -> jax.Array:
        """The mean as a scalar; zero if no elements were counted. Weights that sum to zero give `0 / 0` or `x / 0`."""
        return self.sum / self.divisor

    def merge(self, other: Mean) -> Mean:
        """Returns the mean over the elements of both parts."""
        num_self, num_other = (mean.count if mean.num is None else mean.num for mean in (self, other))
        num = None if self.num is None and other.num is None else num_self + num_other
        return Mean(self.sum + other.sum, self.count + other.count, num)

    @overload
    def __add__(self, other: Mean | Means) -> Means: ...
    @overload
    def __add__(self, other: ArrayLike) -> Mean: ...
    def __add__(self, other: Any) -> Any:
        if isinstance(other, Mean | Means):
            return Means((self,)) + other
        return dataclasses.replace(self, sum=self.sum + _scalar(other) * self.count)

    def _with_sums(self, change: Callable[[jax.Array], jax.Array]) -> Mean:
        return dataclasses.replace(self, sum=change(self.sum))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Means(_Arithmetic):
    """A sum of means with separate counts: `sk.mean(a) + 0.5 * sk.mean(b)`; MLM with NSP, auxiliary losses.

    Exact as a loss: each sum is divided by its count over the full batch before its gradient is computed.

    Wire: as a loss, one more small all-reduce for counts that do not depend only on shapes (multi_term_loss.py).
    """

    parts: tuple[Mean, ...]

    @property
    def value(self) -> jax.Array:
        """The sum of the means as a scalar."""
        return functools.reduce(jnp.add, [part.value for part in self.parts])

    def merge(self, other: Means) -> Means:
        """Returns the sum of the means over the elements of both parts."""
        return Means(tuple(first.merge(part) for first, part in zip(self.parts, other.parts, strict=True)))

    def __add__(self, other: Mean | Means | ArrayLike) -> Means:
        if isinstance(other, Mean | Means):
            return Means(self.parts + (other.parts if isinstance(other, Means) else (other,)))
        return Means((self.parts[0] + other, *self.parts[1:]))

    def _with_sums(self, change: Callable[[jax.Array], jax.Array]) -> Means:
        return Means(tuple(part._with_sums(change) for part in self.parts))


def _scalar(x: ArrayLike) -> jax.Array:
    if isinstance(x, Metric) or jnp.ndim(x) != 0:
        found = "another metric" if isinstance(x, Metric) else f"an array of shape {jnp.shape(x)}"
        raise TypeError(
            f"an sk.mean is one number and combines with scalars only, found {found}. Put it inside the sk.mean(...)."
        )
    x = jnp.asarray(x)
    return x.astype(common_dtype(x.dtype, jnp.float32))


def mean(values: ArrayLike, where: ArrayLike | None = None, weights: ArrayLike | None = None) -> Mean:
    """Returns the weighted mean of `values` over this replica's examples, as a pair of sums.

    Padding rows (a short last batch, an evaluation set that no batch size divides) are excluded. If the batch has
    padding, the first dim of `values` must be the examples.

    Args:
        values: any shape; summed in float32, or in float64 for float64 values.
        where: bool; broadcast to `values` from the left (one per example, or one per element). False excludes.
        weights: float; broadcast in the same way. The count is their sum.

    Raises:
        ConfigError: `values` has no example dim although some rows are padding.
    """
    if isinstance(values, Mean):
        raise TypeError(
            "sk.mean of an sk.mean: it is a mean already. Return it unchanged, or pass the values to sk.mean."
        )
    values = as_float(values)
    included = inclusion_mask("sk.mean", values, where)
    counted = jnp.ones((), values.dtype) if weights is None else jnp.asarray(weights, values.dtype)
    counted = broadcast("sk.mean: weights", counted, values)
    if included is not None:
        counted = jnp.where(included, counted, 0)
        values = jnp.where(included, values, 0)
    if weights is None and included is None:
        return Mean(_local_sum(values), values.dtype.type(values.size))
    if weights is None:
        return Mean(_local_sum(values), counted.sum())
    num = values.dtype.type(values.size) if included is None else included.sum(dtype=values.dtype)
    return Mean(_local_sum(values * counted), _local_sum(counted), num)


def _local_sum(values: jax.Array) -> jax.Array:
    """Returns the sum of a replica's values.

    In the loss of a per-replica step, values that are the same on every replica (results of `sk.psum`) count once per
    replica, so their mean is their value.
    """
    context, examples = trace_context.current(), trace_context.current_examples()
    in_loss = context.inside and not context.in_manual and examples is not None and not examples.of_step
    of_examples = examples is not None and values.ndim > 0 and values.shape[0] == examples.num
    if in_loss and not of_examples and compat.axes_are_typed():
        values = compat.as_varying(jnp.atleast_1d(values), REPLICA_AXES)
    return values.sum()


def scalar(value: ArrayLike) -> Mean:
    """Returns a number that is not a mean over examples, as a metric or a term of a loss: a norm, a penalty.

    It counts once, regardless of padding rows. If it differs between replicas, microbatches or batches of an
    evaluation, their unweighted mean is reported.

    Raises:
        ConfigError: `value` is not a single number.
    """
    value = as_float(value)
    if value.ndim:
        raise ConfigError(
            f"sk.scalar got an array of shape {value.shape}. It takes one number. For examples write sk.mean(values), "
            "for other values sk.scalar(values.mean())."
        )
    return Mean(_local_sum(value), value.dtype.type(1))


def as_float(values: ArrayLike) -> jax.Array:
    """Returns values in the dtype in which they are summed: float32, or float64 for float64 values."""
    values = jnp.asarray(values)
    return values.astype(common_dtype(values.dtype, jnp.float32))


def inclusion_mask(name: str, values: jax.Array, where: ArrayLike | None) -> jax.Array | None:
    """Returns a bool mask like `values`, by `where` and without padding rows; None if all elements count.

    Raises:
        ConfigError: `values` has no example dim although some rows are padding. `name`: the calling function.
    """
    included = None if where is None else broadcast(f"{name}: where", jnp.asarray(where, bool), values)
    examples = trace_context.current_examples()
    usage = trace_context.current().usage
    usage.record_call("mean")
    if examples is not None and examples.mask is not None:
        if values.ndim and values.shape[0] == examples.num:
            usage.num_masked += 1
            rows = _left(examples.mask, values.ndim)
            included = rows if included is None else rows & included
        elif not usage.has_called("example_mask"):
            raise ConfigError(
                f"{name} got values of shape {values.shape} while some of the {examples.num} examples are padding. "
                "The first dim must be the examples, so that padding rows can be excluded. Pass one value per "
                "example (or per example and token), or apply sk.example_mask() yourself. A number that is not a "
                "mean of examples (a norm, a penalty) is an sk.scalar."
            )
    return None if included is None else jnp.broadcast_to(_left(included, values.ndim), values.shape)


def _left(x: jax.Array, ndim: int) -> jax.Array:
    """Returns `x` with trailing dims of size one, so that it broadcasts from the left."""
    return x.reshape(x.shape + (1,) * (ndim - x.ndim)) if x.ndim < ndim else x


def broadcast(name: str, x: jax.Array, values: jax.Array) -> jax.Array:
    """Returns `x` broadcast from the left to the shape of `values`. `name` begins the error message."""
    wide = _left(x, values.ndim)
    if wide.ndim != values.ndim or any(n not in (1, m) for n, m in zip(wide.shape, values.shape, strict=True)):
        raise ValueError(
            f"{name} has shape {x.shape}, the values have {values.shape}. Its dims are the first of the values': one "
            "per example, or one per element."
        )
    return jnp.broadcast_to(wide, values.shape)


def example_mask() -> jax.Array:
    """Returns bool[examples] for this call of the loss, False on padding rows.

    The caller is then responsible for masking. `sk.mean` still excludes padding rows of values with examples as their
    first dim, and does not check values of other shapes.

    Raises:
        RuntimeError: called outside of a loss that spmdkit runs.
    """
    examples = _required("sk.example_mask()")
    trace_context.current().usage.record_call("example_mask")
    return jnp.ones(examples.num, bool) if examples.mask is None else examples.mask


def example_keys(salt: int | str | jax.Array = 0) -> jax.Array:
    """Returns one random key per example of this call of the loss, identical on every mesh.

    Keys depend only on (seed, step, position in the global batch). Random values drawn from them (dropout per example,
    augmentation) do not change with the number of devices, hosts or microbatches. The plain `key` of a loss does.

    Shapes: key[examples], for `jax.vmap`. Always threefry keys, independent of JAX's default implementation.

    Args:
        salt: an integer or a string. Different salts give independent keys, for example one per layer. Inside `layer`
            of `sk.pipeline` the number of the layer is folded in.

    Raises:
        ConfigError: the salt is neither. Or a second call draws from the keys of the first, in the same place or in
            each iteration of a loop. The keys of one call may be passed to several layers.
        RuntimeError: called outside of a loss that spmdkit runs, or in an evaluation without a key.
    """
    examples = _required("sk.example_keys()")
    if examples.key is None:
        raise RuntimeError("sk.example_keys() in an evaluation: there is no randomness. Draw only if key is not None.")
    trace_context.current().usage.record_call("example_keys")
    number = isinstance(salt, int | np.ndarray | np.generic | jax.Array) and jnp.ndim(salt) == 0
    number = number and jnp.issubdtype(jnp.result_type(salt), jnp.integer)
    if not (isinstance(salt, str) or number) or (isinstance(salt, int) and not 0 <= salt < 2**32):
        raise ConfigError(
            f"sk.example_keys: the salt is {salt!r}. It is a string, or an integer from 0 to 2**32 - 1. Try "
            "sk.example_keys('dropout')."
        )
    return rng.example_keys(examples.key, salt, examples.positions, examples.layer)


def _required(name: str) -> trace_context.Examples:
    examples = trace_context.current_examples()
    if examples is None:
        raise RuntimeError(
            f"{name} was called outside of a loss that spmdkit runs. To call a loss by hand, wrap it in `with "
            "sk.examples(num, key=key):`."
        )
    return examples


def examples(num: int, key: jax.Array | None = None, mask: jax.Array | None = None) -> AbstractContextManager[None]:
    """Returns a context in which a loss can be called directly: `num` rows at positions 0..num-1."""
    positions = jnp.arange(num, dtype=jnp.int32)
    return trace_context.with_examples(trace_context.Examples(num, mask, positions, key))


SEAMS = {"required": _required}
"""Functions that `verify` replaces to inject a known mistake (verify/mutations.py)."""
