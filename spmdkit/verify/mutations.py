"""The bugs that mutants inject, and the seams through which they enter a program.

Each bug replaces one function while a program is traced and run. A module of the package lists its replaceable
functions in a table, `SEAMS`, so that a rename fails in that module. No other code depends on the bugs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from spmdkit import compat
from spmdkit.checkpoint import state_dict
from spmdkit.data import feed
from spmdkit.foundation.trees import is_key, named_leaves
from spmdkit.mesh.mesh import BATCH_AXES, REPLICA_AXES
from spmdkit.ops.pipeline import parts
from spmdkit.step import accumulator as sums_module
from spmdkit.step import gradient, multi_term_loss, reduction, trace_context
from spmdkit.step.accumulator import Sums
from spmdkit.step.checks.implicit_psum import summed_by_types
from spmdkit.step.metrics.mean import Mean, Means
from spmdkit.step.model_state import agreement
from spmdkit.verify.task_runner import Setting

MutationContext = contextlib.AbstractContextManager[list[Any]]
"""A context that injects a bug into the program. It yields a list that is not empty once the seam was used."""


@contextlib.contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces a function by `make(the original)` while the body runs."""
    owner, name = resolve_seam(owner, name)
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def resolve_seam(owner: Any, name: str) -> tuple[Any, str]:
    """Returns (module or class, the name in it) of a seam."""
    table = getattr(owner, "SEAMS", None)
    if table is None:
        return owner, name
    *classes, attribute = table[name].__qualname__.split(".")
    return functools.reduce(getattr, classes, owner), attribute


def seams(*replacements: tuple[Any, str, Callable[..., Any]]) -> Callable[[Setting], MutationContext]:
    """Returns a mutant's `apply`. For each (owner, name, wrong), `wrong(acted, original, *arguments)` replaces the
    seam's `original(*arguments)`, and appends to `acted` if the bug changes something."""

    @contextlib.contextmanager
    def apply(setting: Setting) -> Iterator[list[Any]]:
        acted: list[Any] = []
        with contextlib.ExitStack() as stack:
            for owner, name, wrong in replacements:

                def make(original: Callable[..., Any], wrong: Callable[..., Any] = wrong) -> Callable[..., Any]:
                    return lambda *args, **kwargs: wrong(acted, original, *args, **kwargs)

                stack.enter_context(patched(owner, name, make))
            yield acted

    return apply


def seam(owner: Any, name: str, wrong: Callable[..., Any]) -> Callable[[Setting], MutationContext]:
    """Returns a mutant's `apply`: `wrong(original, *arguments)` replaces the seam's `original(*arguments)`."""

    def replacement(acted: list[Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        acted.append(name)
        return wrong(original, *args, **kwargs)

    return seams((owner, name, replacement))


# ---- reductions

Reduce = Callable[[Sums, Any, tuple[str, ...]], tuple[Sums, Any, Any]]
"""`(sums, other summed values, axes) -> (sums, other summed values, the reducer's state)`."""


def reducing(
    mistake: Callable[[Reduce, Sums, Any, tuple[str, ...], Setting], tuple[Sums, Any, Any]],
) -> Callable[[Setting], MutationContext]:
    """Returns a mutant's `apply`, in which `mistake(reduce, sums, added, axes, setting)` replaces `reduce(sums, added,
    axes)`."""

    def apply(setting: Setting) -> MutationContext:
        def replacement(
            acted: list[Any], reduced: Callable[..., Any], context: Any, sums: Sums, added: Any, axes: Any, *rest: Any
        ) -> Any:
            acted.append(axes)
            reduce = lambda sums, added, axes: reduced(context, sums, added, axes, *rest)
            return mistake(reduce, sums, added, axes, setting)

        return seams((reduction, "reduced", replacement))(setting)

    return apply


def dropped(reduce: Reduce, sums: Sums, added: Any, axes: tuple[str, ...], _: Setting) -> Any:
    reduced_sums, added, reducer_state = reduce(sums, added, axes)
    if reduced_sums.gradient is None:
        return *jax.tree.map(lambda x: _first_only(x, axes), (sums, added)), reducer_state
    unscattered = lambda x, y: _first_only(x, axes) if jnp.shape(x) == jnp.shape(y) else y  # ZeRO 2 has scattered it
    return *jax.tree.map(unscattered, (sums, added), (reduced_sums, added)), reducer_state


def _first_only(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the first device's value along `axes`, on all devices: the value read from an array that was never
    reduced."""
    first: jax.Array = lax.psum(jnp.where(lax.axis_index(axes) == 0, x, jnp.zeros_like(x)), axes)
    return first


def doubled(reduce: Reduce, sums: Sums, added: Any, axes: tuple[str, ...], _: Setting) -> Any:
    sums, added, reducer_state = reduce(sums, added, axes)
    return _on_gradient(lambda x: x * lax.axis_size(axes), sums), added, reducer_state


def reduce_over_wrong_axis(reduce: Reduce, sums: Sums, added: Any, axes: tuple[str, ...], _: Setting) -> Any:
    """Adds over the last replica axis only. Along the other replica axes, the first device's partial sum is read."""
    *partial, reducer_state = reduce(sums, added, axes[-1:])
    return *jax.tree.map(lambda x: _first_only(x, axes[:-1]), tuple(partial)), reducer_state


@contextlib.contextmanager
def mean_of_means(setting: Setting) -> Iterator[list[Any]]:
    """Divides by each replica's local count, then takes the plain mean over replicas. In a sum of means, this applies
    to each mean."""
    with reducing(_by_own_count)(setting) as acted, seam(multi_term_loss, "of_all", _own_counts)(setting):
        yield acted


def _by_own_count(reduce: Reduce, sums: Sums, added: Any, axes: tuple[str, ...], _: Setting) -> Any:
    if not _is_undivided(sums):
        return reduce(sums, added, axes)
    assert isinstance(sums.loss, Mean)
    factor = lax.psum(sums.loss.count, axes) / lax.axis_size(axes) / jnp.maximum(sums.loss.count, 1)
    return reduce(_on_gradient(lambda x: x * factor, sums), added, axes)


def _own_counts(_: Any, context: trace_context.Context, loss: Means, with_sums: bool) -> Means:
    num = context.sharding.size(*REPLICA_AXES) if context.inside else context.sharding.num_replicas
    return Means(tuple(Mean(part.sum * num, part.count * num, part.num) for part in loss.parts))


def _is_undivided(sums: Sums) -> bool:
    """Returns whether the gradient is still to be divided by the global count."""
    return sums.facts is not None and not sums.facts.divided


def clip_by_replica_norm(reduce: Reduce, sums: Sums, added: Any, axes: tuple[str, ...], setting: Setting) -> Any:
    """Clips each replica's local mean gradient before the reduction."""
    if sums.loss is None:
        return reduce(sums, added, axes)
    assert setting.clip_norm is not None
    # A gradient that is already divided by the global counts is the replica's share.
    undivided = isinstance(sums.loss, Mean) and _is_undivided(sums)
    count = jnp.maximum(sums.loss.count, 1) if undivided else 1 / lax.axis_size(axes)  # type: ignore[union-attr]
    scale = jnp.minimum(1.0, setting.clip_norm * count / optax.tree.norm(sums.gradient))
    return reduce(_on_gradient(lambda x: x * scale, sums), added, axes)


def _on_gradient(change: Callable[[jax.Array], jax.Array], sums: Sums) -> Sums:
    return dataclasses.replace(sums, gradient=jax.tree.map(change, sums.gradient))


def apart(reduce: Reduce, sums: Sums, added: Any, axes: tuple[str, ...], _: Setting) -> Any:
    """Makes the gradient of every replica but the first a few ulps larger, which is below any tolerance."""
    factor = 1 + 3e-7 * (lax.axis_index(axes) > 0)
    sums, added, reducer_state = reduce(sums, added, axes)
    return _on_gradient(lambda x: x * factor.astype(x.dtype), sums), added, reducer_state


def _typed(acted: list[Any], shard_map: Callable[..., Any], body: Callable[..., Any], **specs: Any) -> Any:
    if specs.pop("check_vma", True):
        return shard_map(body, **specs)

    def varying_body(params: Any, state: Any, rows: Any, mask: Any, reducer_states: Any) -> Any:
        params, rows, mask = compat.as_varying((params, rows, mask), REPLICA_AXES)
        return body(params, state, rows, mask, reducer_states)

    def checked(*args: Any) -> Any:
        typed = jax.make_jaxpr(shard_map(varying_body, **specs))(*args)
        right = jax.make_jaxpr(shard_map(body, check_vma=False, **specs))(*args)
        if (line := summed_by_types(typed, right, REPLICA_AXES)) is not None:
            acted.append(line)
        return shard_map(varying_body, **specs)(*args)

    return checked


type_replicas = seams((jax, "shard_map", _typed))
"""Types the manual form: JAX then sums over replicas each gradient that the loss itself takes."""


def _shares_without_count(
    acted: list[Any], shares: Callable[..., Any], whole: Means, primals: Any, depends: bool
) -> Any:
    acted.extend([True] * bool(depends))
    return shares(whole, primals, False)


def _mean_without_count(acted: list[Any], of_mean: Callable[..., Any], sums: Sums, loss: Mean) -> Any:
    acted.extend([True] * (sums.count_gradient is not None))
    return of_mean(dataclasses.replace(sums, count_gradient=None), loss)


count_without_gradient = seams(
    (sums_module, "mean_gradient", _mean_without_count), (multi_term_loss, "shares", _shares_without_count)
)
"""The gradient of a mean ignores that its count depends on the parameters. In a sum of means, this applies to each
mean."""


def _data(x: Any) -> Any:
    return jax.random.key_data(x) if is_key(x) else x


def _send_all(acted: list[Any], crossing: Callable[..., Any], kinds: Any, old: Any, new: Any, first: Any) -> Any:
    leaves = named_leaves(new)
    acted.extend(p for p, x in leaves if kinds[p] in ("sum", "max") or _data(x).dtype == jnp.uint32)
    return {path: _data(x) for path, x in leaves}, {}


def _average(
    acted: list[Any], agreed: Callable[..., Any], kinds: Any, old: Any, new: Any, added: Any, largest: Any, num: int
) -> Any:
    def leaf(path: str, like: Any) -> Any:
        mean = added[path] / num if jnp.issubdtype(_data(like).dtype, jnp.inexact) else added[path] // num
        if is_key(like):
            return jax.random.wrap_key_data(mean, impl=jax.random.key_impl(like))
        return mean.astype(like.dtype)

    return jax.tree.unflatten(jax.tree.structure(new), [leaf(path, x) for path, x in named_leaves(new)])


average_state = seams((agreement, "crossing", _send_all), (agreement, "agreed", _average))
"""Every leaf of the model state is averaged over replicas, including counters, maxima and keys."""


# ---- examples and their keys


def share_positions(positions: Any, context: Any, replica: Any, micro: Any, num: int) -> Any:
    return positions(context, 0, micro, num)


def fold_positions(positions: Any, context: Any, replica: Any, micro: Any, num: int) -> Any:
    return positions(context, replica, micro, num) + jnp.asarray(replica, jnp.int32) * 2**16


def drop_mask(place: Any, owner: feed.Feed, local: Any) -> Any:
    return place(owner, local._replace(mask=None))


def repeat_first_rows(setting: Setting) -> MutationContext:
    def repeated(place: Any, owner: feed.Feed, local: Any) -> Any:
        num = math.prod(setting.mesh.get(axis, 1) for axis in BATCH_AXES)
        rows = jax.tree.map(lambda x: np.concatenate([x[: len(x) // num]] * num), local.examples)
        return place(owner, local._replace(examples=rows))

    return seam(feed, "place", repeated)(setting)


def mark_padding_real(gathered_mask: Any, axes: tuple[str, ...], num: int | None) -> jax.Array:
    return jnp.ones_like(gathered_mask(axes, num))


def repeat_first_microbatch(split_microbatches: Any, context: Any, x: jax.Array) -> jax.Array:
    parts = split_microbatches(context, x)
    return jnp.concatenate([parts[:-1], parts[:1]])


# ---- optimizer and checkpoint


def clip_by_shard_norm(_: Any, max_norm: float) -> optax.GradientTransformation:
    """Returns a clipping transformation in which each device scales its gradient shard by the norm of that shard."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        context = trace_context.current()
        assert context.sharding.placements is not None
        specs = context.sharding.placements.of(grads).update

        def body(shards: Any) -> Any:
            sharded = [x for x, spec in zip(jax.tree.leaves(shards), jax.tree.leaves(specs), strict=True) if len(spec)]
            scale = jnp.minimum(1.0, max_norm / optax.tree.norm(sharded))
            return jax.tree.map(lambda x, spec: x * scale if len(spec) else x, shards, specs)

        return jax.shard_map(body, mesh=context.sharding.mesh, in_specs=(specs,), out_specs=specs)(grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _lose_leaf(lost: list[Any], pick: Callable[..., Any], tree: Any, path: str) -> Any:
    leaf = pick(tree, path)
    if not lost and path.startswith("params") and leaf.any():
        lost.append(path)
        return jnp.zeros_like(leaf)
    return leaf


lose_checkpoint_leaf = seams((state_dict, "pick", _lose_leaf))


# ---- ops


def use_first_vocab_shard(axis_index: Any, names: Any) -> Any:
    return 0 * axis_index(names)


def shift_ring_twice(ring_shift: Callable[..., jax.Array], x: jax.Array, name: str) -> jax.Array:
    return ring_shift(x, name, 2)


def _stop_last(acted: list[Any], chunks: Callable[..., Any], own: Any, layers: Any) -> Any:
    acted.append("chunks")
    return jax.tree.map(lambda w: w.at[-1].set(lax.stop_gradient(w[-1])), chunks(own, layers))


def _drop_last(acted: list[Any], joined: Callable[..., Any], own: Any, chunks: Any, layers: Any) -> Any:
    return joined(own, jax.tree.map(lambda g: g.at[-1].set(0), chunks), layers)


drop_last_stage_gradient = seams((parts, "chunks", _stop_last), (parts, "joined", _drop_last))
"""The layers of the last stage get no gradient, in loops with automatic and with manual differentiation."""


# ---- user bugs: in the loss, independent of the toolkit


def in_loss(wrong: Callable[..., Any]) -> Callable[[Setting], MutationContext]:
    """Returns a mutant's `apply`: `wrong(acted, loss_fn, *arguments)` replaces the user's `loss_fn(*arguments)`."""

    def replacement(
        acted: list[Any], local_gradient: Callable[..., Any], loss_fn: Callable[..., Any], *rest: Any
    ) -> Any:
        return local_gradient(functools.partial(wrong, acted, loss_fn), *rest)

    return seams((gradient, "local_gradient", replacement))


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
"""Sums and means over replicas return the replica's local value."""

first_statistics = _replacing_sums(
    lambda psum, x, names: psum(jnp.where(lax.axis_index(names) == 0, x, jnp.zeros_like(x)), names)
)
"""Sums and means over replicas return the first replica's value on all of them."""


def shard_mean(acted: list[Any], loss_fn: Callable[..., Any], *args: Any) -> Any:
    """Makes the loss the mean over the replica's local examples, with count 1; in a sum of means, each mean."""
    out = loss_fn(*args)
    loss, *rest = out if isinstance(out, tuple) else (out,)
    if not isinstance(loss, Mean | Means):
        return out
    acted.append(loss)
    with_count_one: Callable[[Mean], Mean] = lambda mean: Mean(
        mean.sum / jnp.maximum(mean.count, 1), mean.sum.dtype.type(1)
    )
    local = Means(tuple(map(with_count_one, loss.parts))) if isinstance(loss, Means) else with_count_one(loss)
    return (local, *rest) if rest else local


def fold_by_local_row(acted: list[Any], loss_fn: Callable[..., Any], *args: Any) -> Any:
    """Derives example keys from the loss's plain key and the position among the replica's local examples."""
    examples, key = trace_context.current_examples(), args[-1]
    if examples is None or key is None:
        return loss_fn(*args)
    acted.append(key)
    positions = jnp.arange(examples.num, dtype=jnp.int32)
    with trace_context.with_examples(dataclasses.replace(examples, positions=positions, key=key)):
        return loss_fn(*args)


def unmasked(required: Any, name: str) -> Any:
    """Makes `sk.example_mask()` True for padding rows too, while `sk.mean` excludes them."""
    examples = required(name)
    return dataclasses.replace(examples, mask=None) if "example_mask" in name else examples
