"""Mutants with mistakes of users: mistakes in the loss, independent of the toolkit.

Each wraps the user's loss at the seam `gradient: local_gradient` (mutations.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit.mesh.mesh import REPLICA_AXES
from spmdkit.step import gradient, trace_context
from spmdkit.step.metrics.mean import Mean, Means
from spmdkit.verify.mutations import MutationContext, patched
from spmdkit.verify.task_runner import Setting


def in_loss(wrong: Callable[..., Any]) -> Callable[[Setting], MutationContext]:
    """Returns a mutant's `apply`: `wrong(acted, loss_fn, *arguments)` replaces the user's `loss_fn(*arguments)`."""

    @contextlib.contextmanager
    def apply(setting: Setting) -> Iterator[list[Any]]:
        acted: list[Any] = []

        def make(local_gradient: Callable[..., Any]) -> Callable[..., Any]:
            return lambda loss_fn, *rest: local_gradient(functools.partial(wrong, acted, loss_fn), *rest)

        with patched(gradient, "local_gradient", make):
            yield acted

    return apply


def _replacing_sums(of_replica: Callable[..., Any]) -> Callable[[Setting], MutationContext]:
    """Returns a mutant's `apply`: `of_replica(psum, x, names)` replaces the sums and means over replicas in the user's
    loss."""

    def wrong(acted: list[Any], loss_fn: Callable[..., Any], *args: Any) -> Any:
        psum = lax.psum

        def make(collective: Callable[..., Any]) -> Callable[..., Any]:
            def replacement(x: Any, axis_name: Any, **kwargs: Any) -> Any:
                names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
                if not set(names) <= set(REPLICA_AXES):
                    return collective(x, axis_name, **kwargs)
                acted.append(names)
                return jax.tree.map(lambda leaf: of_replica(psum, leaf, names), x)

            return replacement

        with patched(lax, "psum", make), patched(lax, "pmean", make):
            return loss_fn(*args)

    return in_loss(wrong)


local_statistics = _replacing_sums(lambda psum, x, names: x)
"""Sums and means over replicas return the replica's own value."""

first_statistics = _replacing_sums(
    lambda psum, x, names: psum(jnp.where(lax.axis_index(names) == 0, x, jnp.zeros_like(x)), names)
)
"""Sums and means over replicas return the first replica's value on all of them."""


def shard_mean(acted: list[Any], loss_fn: Callable[..., Any], *args: Any) -> Any:
    """The loss is the mean over the replica's own examples, as one value; in a sum of means, each of them."""
    out = loss_fn(*args)
    loss, *rest = out if isinstance(out, tuple) else (out,)
    if not isinstance(loss, Mean | Means):
        return out
    acted.append(loss)
    one = lambda mean: Mean(mean.sum / jnp.maximum(mean.count, 1), mean.sum.dtype.type(1))
    own = Means(tuple(map(one, loss.parts))) if isinstance(loss, Means) else one(loss)
    return (own, *rest) if rest else own


def fold_by_local_row(acted: list[Any], loss_fn: Callable[..., Any], *args: Any) -> Any:
    """Example keys are made from the loss's plain key and the position among the replica's own examples."""
    examples, key = trace_context.current_examples(), args[-1]
    if examples is None or key is None:
        return loss_fn(*args)
    acted.append(key)
    places = jnp.arange(examples.num, dtype=jnp.int32)
    with trace_context.with_examples(dataclasses.replace(examples, positions=places, key=key)):
        return loss_fn(*args)


def unmasked(required: Any, name: str) -> Any:
    """`sk.example_mask()` is True for padding rows too, while `sk.mean` excludes them."""
    examples = required(name)
    return dataclasses.replace(examples, mask=None) if "example_mask" in name else examples
