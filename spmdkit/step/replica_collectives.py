"""`sk.all_gather`, `sk.psum`, `sk.pmean` and the replica index: communication between replicas in a loss.

Inside a loss, arrays hold the rows of one replica. These functions combine the rows of all replicas, on every mesh and
in every form of a step. With one replica each is the identity. They are differentiable: each replica differentiates its
local sum, and the cotangents of its rows on other replicas are sent back.

R replicas; `bytes` is the size of one replica's operand. Sent per replica and call, with a ring:

    all_gather    (R-1) bytes          backward: reduce_scatter, the same bytes
    psum, pmean   2 (R-1)/R bytes      backward: all_reduce, the same bytes

In a per-replica `train_step` they run over the replicas of the step. In a global `train_step` they are not needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import describe, named_leaves
from spmdkit.mesh.mesh import REPLICA_AXES
from spmdkit.step import trace_context
from spmdkit.step.metrics.base import is_metric, reduce_parts
from spmdkit.step.metrics.user_metric import CustomMetric, as_metric, is_user_metric


def all_gather(tree: Any, with_mask: bool = False) -> Any:
    """Returns `tree` of all replicas: each leaf [rows, ...] as [replicas * rows, ...], in batch order. With
    microbatches, the rows are those of one microbatch.

    The rows of this replica start at `sk.replica_index() * rows`. If a batch can be short, some rows are padding and
    must be excluded with the mask (as negatives, in a statistic).

    Args:
        tree: arrays with the examples as first dim, or other arrays with at least one dim.
        with_mask: returns (tree, bool[replicas * rows]), False on padding rows.

    Raises:
        ConfigError: some rows are padding and the mask is not used; a leaf is a scalar; arrays are global here.
    """
    axes = _axes("sk.all_gather")
    trace_context.current().usage.record_call("all_gather")
    examples = trace_context.current_examples()
    num = None if examples is None else examples.num
    for path, leaf in named_leaves(tree):
        what = f"leaf '{path}'" if path else "the value"
        if jnp.ndim(leaf) == 0 or (with_mask and leaf.shape[0] != num):
            of_mask = "with_mask=True, and its first dim must be the examples"
            requirement = of_mask if jnp.ndim(leaf) else "at least one dim"
            raise ConfigError(
                f"sk.all_gather: {what} is {describe(leaf)}. It joins arrays along their first dim, so it needs "
                f"{requirement}. Write x[None] for one number of each replica, or sk.psum(x) for its sum."
            )
        unmasked = not with_mask and not trace_context.current().usage.has_called("example_mask")
        if unmasked and examples is not None and examples.mask is not None and leaf.shape[0] == num:
            raise ConfigError(
                f"sk.all_gather: {what} is {describe(leaf)}, while some of the {num} examples may be padding: they "
                "would count as examples. The mask shows which rows are real. Write `rows, mask = sk.all_gather(x, "
                "with_mask=True)` and exclude rows where it is False (jnp.where(mask, logits, -jnp.inf))."
            )
    gathered = jax.tree.map(lambda x: _joined(jnp.asarray(x), axes), tree)
    return (gathered, _gathered_mask(axes, num)) if with_mask else gathered


def _gathered_mask(axes: tuple[str, ...], num: int | None) -> jax.Array:
    """Returns bool[replicas * rows], False on padding rows."""
    examples = trace_context.current_examples()
    mask = None if examples is None else examples.mask
    return jnp.ones((num or 0) * num_replicas(), bool) if mask is None else _joined(mask, axes)


def _joined(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.all_gather(x, axes, axis=0, tiled=True) if axes else x


def replica_index() -> jax.Array:
    """Returns the index of this replica, int32[]. On another mesh the same example may be on another replica.

    Raises:
        ConfigError: arrays are global here.
    """
    axes = _axes("sk.replica_index")
    return jnp.asarray(lax.axis_index(axes) if axes else 0, jnp.int32)


def num_replicas() -> int:
    """Returns the number of replicas. Each replica computes the loss of its part of the batch.

    Raises:
        ConfigError: arrays are global here.
    """
    return trace_context.current().sharding.num_replicas if _axes("sk.num_replicas") else 1


def psum(tree: Any) -> Any:
    """Returns the sum of `tree` over all replicas, on every replica.

    Wire: one all-reduce of the tree.

    Raises:
        ConfigError: a leaf is already the same on all replicas, so the sum would be N times too large (detected in
            per-replica steps); arrays are global here.
    """
    axes = _axes("sk.psum")
    larger = trace_context.current().sharding.larger(REPLICA_AXES)
    for path, leaf in named_leaves(tree) if _is_typed() else ():
        varying = compat.varying_axes(leaf)
        if not varying or not varying.issuperset(larger):
            raise ConfigError(reduced_twice("sk.psum", f"leaf '{path}'" if path else "the value"))
    return _reduced(axes, tree)


def pmean(tree: Any) -> Any:
    """Returns the mean of `tree` over all replicas. An `sk.mean` in it is pooled by its counts, not averaged; other
    metrics are merged. In a per-replica step, the mean of a leaf that is the same on all replicas is the leaf.

    Wire: one all-reduce of the leaves that differ.

    Raises:
        ConfigError: arrays are global here.
    """
    axes = _axes("sk.pmean")
    leaves, structure = jax.tree.flatten(_taken(tree), is_leaf=is_metric)
    may_differ: Callable[[Any], bool] = lambda x: not _is_typed() or any(map(compat.varying_axes, jax.tree.leaves(x)))
    differing = [i for i, x in enumerate(leaves) if may_differ(x)]
    divisors = dict.fromkeys(range(len(leaves)), 1) | dict.fromkeys(differing, num_replicas())
    operands = [compat.as_varying(leaves[i], axes if _is_typed() else ()) for i in differing]
    for i, total in zip(differing, _reduced(axes, operands), strict=True):
        leaves[i] = total
    means = [x if is_metric(x) else x / divisors[i] for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, means)


def _taken(tree: Any) -> Any:
    """Returns a tree in which user-defined metrics are the mergeable parts of this replica."""
    is_leaf = lambda x: is_metric(x) or is_user_metric(x)
    tree = jax.tree.map(lambda x: as_metric(x, "a metric in sk.pmean"), tree, is_leaf=is_leaf)
    if not trace_context.current().inside:
        return tree
    is_custom: Callable[[Any], bool] = lambda x: isinstance(x, CustomMetric)
    varying = lambda x: dataclasses.replace(x, some=compat.as_varying(x.some, REPLICA_AXES)) if is_custom(x) else x
    return jax.tree.map(varying, tree, is_leaf=is_custom)


def _is_typed() -> bool:
    """Returns whether the types of arrays hold the replica axes over which they vary: in a per-replica step."""
    return trace_context.current().inside and compat.axes_are_typed()


def _reduced(axes: tuple[str, ...], tree: Any) -> Any:
    if not axes:
        return tree
    largest: Callable[[Any], Any] = lambda maxima: lax.pmax(maxima, axes)
    gather: Callable[[Any], jax.Array] = lambda x: compat.all_gather_invarying(x[None], axes)
    examples = trace_context.current_examples()
    of_step = examples is not None and examples.of_step  # a loss's communication is not the step's reduction
    with jax.named_scope(trace_context.REDUCE) if of_step else contextlib.nullcontext():
        return reduce_parts(tree, lambda sums: lax.psum(sums, axes), largest, gather)


def _axes(name: str) -> tuple[str, ...]:
    """Returns the bound replica axes, none with one replica; raises ConfigError if arrays are global or shards."""
    context, examples = trace_context.current(), trace_context.current_examples()
    if trace_context.is_in_part():
        raise ConfigError(
            f"{name} was called inside sk.manual, where arrays are the shards of one device and not the rows of a "
            "replica. Call it before or after the part, and pass its result as an argument."
        )
    if context.inside:
        return REPLICA_AXES
    if examples is not None and examples.whole:
        raise ConfigError(
            f"{name} was called outside of a per-replica step and of a loss. In the global view arrays are global: "
            "they hold the rows of all replicas, so there is nothing to reduce. Remove it, move it into the loss of "
            "sk.value_and_grad, or set the task's view='replica'."
        )
    return () if context.sharding.form == "plain" else REPLICA_AXES


def reduced_twice(name: str, what: str) -> str:
    """Returns the message about a sum over replicas of a value that is already the same on all replicas."""
    return (
        f"{name}: {what} is already the same on every replica: it was reduced twice. Another sum would make it N "
        "times too large. Remove one of the two reductions (sk.value_and_grad has already reduced; a number that is "
        "the same on all replicas is an sk.scalar). If it is a derivative with respect to a constant, JAX has summed "
        "it over replicas: differentiate with respect to a varying value, `x * 0` instead of `jnp.zeros(...)`."
    )


SEAMS = {"gathered_mask": _gathered_mask}
"""Functions that `verify` replaces to inject mistakes (verify/mutations.py)."""
