"""The mistakes that mutants make, and the seams through which they get into a program.

Each replaces one function while a program is traced and run. Functions of the package are listed in a table next to
the function, `SEAMS` of its module, so that a rename fails where it is made; nothing else in the package knows of it.

    seam                               what passes through it
    reduction: reduced                 everything that is added over replicas: sums and counts, gradient, model state
    jax.shard_map                      the manual form: where it is traced without types
    sums: mean_gradient                sums and counts with their gradients, on the way to the gradient of the mean
    several: of_all, shares            of a sum of means: the counts of all replicas, and what a sum and its count count
                                       for in the gradient
    agree: crossing, agreed            the model state on its way to the other replicas and back
    gradient: positions                places of a replica's examples in the global batch, from which example keys are
                                       made
    gradient: local_gradient           the user's loss on one replica
    gradient: cut_microbatches         the parts of a batch
    means: required                    the mask and the keys of examples that the user requests
    feed: place                        the mask of a short batch
    across: gathered_mask              which of everybody's rows are padding
    optax.clip_by_global_norm          the clipping of `clip_norm`
    checkpoint.leaves: pick            each leaf that a checkpoint gives back
    ops.vocab: axis_index              which part of the vocabulary a device holds
    ops.ring_attention: ring_shift     keys and values on their way round, and their gradients
    ops.pipeline.parts: chunks, joined the layers on their way to the stages, their gradients on the way back
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from spmdkit import compat
from spmdkit.checkpoint import state_dict
from spmdkit.data import feed
from spmdkit.foundation.trees import is_key, named_leaves
from spmdkit.mesh.mesh import REPLICA_AXES
from spmdkit.ops.pipeline import parts
from spmdkit.step import accumulator as sums_module
from spmdkit.step import multi_term_loss, reduction, trace_context
from spmdkit.step.accumulator import Sums
from spmdkit.step.checks.implicit_psum import summed_by_types
from spmdkit.step.metrics.mean import Mean, Means
from spmdkit.step.model_state import agreement
from spmdkit.verify.task_runner import Setting

MutationContext = contextlib.AbstractContextManager[list[Any]]
"""A context with a mistake in the program. Gives a list that holds something once the seam was used."""


@contextlib.contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces a function by `make(the original)` while the body runs.

    Args:
        owner: a module of the package with a table of seams, or what holds a function of a library.
        name: in that table; of a library, the function's own.

    Raises:
        AttributeError, KeyError: the seam is not there any more.
    """
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
    *classes, own_name = table[name].__qualname__.split(".")
    return functools.reduce(getattr, classes, owner), own_name


def seam(owner: Any, name: str, wrong: Callable[..., Any]) -> Callable[[Setting], MutationContext]:
    """Returns a mutant's `apply`: `wrong(original, *arguments)` instead of the seam's `original(*arguments)`."""

    @contextlib.contextmanager
    def apply(setting: Setting) -> Iterator[list[Any]]:
        acted: list[Any] = []

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def replacement(*args: Any, **kwargs: Any) -> Any:
                acted.append(name)
                return wrong(original, *args, **kwargs)

            return replacement

        with patched(owner, name, make):
            yield acted

    return apply


# ---- reductions ------------------------------------------------------------------------------------------------------

Reduce = Callable[[Sums, Any, tuple[str, ...]], tuple[Sums, Any, Any]]
"""`(sums, what else is added, axes) -> (sums, what else is added, the reducer's state)`."""


def reducing(
    mistake: Callable[[Reduce, Sums, Any, tuple[str, ...], Setting], tuple[Sums, Any, Any]],
) -> Callable[[Setting], MutationContext]:
    """Returns a mutant's `apply`: `mistake(reduce, sums, added, axes, setting)` instead of `reduce(sums, added,
    axes)`."""

    @contextlib.contextmanager
    def apply(setting: Setting) -> Iterator[list[Any]]:
        acted: list[Any] = []

        def make(reduced: Callable[..., Any]) -> Callable[..., Any]:
            def replacement(context: Any, sums: Sums, added: Any, axes: tuple[str, ...], *rest: Any) -> Any:
                acted.append(axes)
                reduce = lambda sums, added, axes: reduced(context, sums, added, axes, *rest)
                return mistake(reduce, sums, added, axes, setting)

            return replacement

        with patched(reduction, "reduced", make):
            yield acted

    return apply


def dropped(reduce: Reduce, sums: Sums, added: Any, axes: tuple[str, ...], _: Setting) -> Any:
    alike, added, kept = reduce(sums, added, axes)
    if alike.gradient is None:
        return *jax.tree.map(lambda x: _first_only(x, axes), (sums, added)), kept
    own = lambda x, y: _first_only(x, axes) if jnp.shape(x) == jnp.shape(y) else y  # ZeRO 2 has scattered it
    return *jax.tree.map(own, (sums, added), (alike, added)), kept


def _first_only(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns what the first device along `axes` holds, on all of them: what is read of an array that was never
    reduced."""
    return lax.psum(jnp.where(lax.axis_index(axes) == 0, x, jnp.zeros_like(x)), axes)


def doubled(reduce: Reduce, sums: Sums, added: Any, axes: tuple[str, ...], _: Setting) -> Any:
    sums, added, kept = reduce(sums, added, axes)
    return _on_gradient(lambda x: x * lax.axis_size(axes), sums), added, kept


def reduce_over_wrong_axis(reduce: Reduce, sums: Sums, added: Any, axes: tuple[str, ...], _: Setting) -> Any:
    """Adds over the last of the replica axes alone; along the others the first device's part is what is read."""
    *partial, kept = reduce(sums, added, axes[-1:])
    return *jax.tree.map(lambda x: _first_only(x, axes[:-1]), tuple(partial)), kept


@contextlib.contextmanager
def mean_of_means(setting: Setting) -> Iterator[list[Any]]:
    """Divides by each replica's own count, and then takes the plain mean of the replicas: of a loss that is a sum of
    means, each of them."""
    with reducing(_by_own_count)(setting) as acted, seam(multi_term_loss, "of_all", _own_counts)(setting):
        yield acted


def _by_own_count(reduce: Reduce, sums: Sums, added: Any, axes: tuple[str, ...], _: Setting) -> Any:
    if not isinstance(sums.loss, Mean):
        return reduce(sums, added, axes)
    factor = lax.psum(sums.loss.count, axes) / lax.axis_size(axes) / jnp.maximum(sums.loss.count, 1)
    return reduce(_on_gradient(lambda x: x * factor, sums), added, axes)


def _own_counts(_: Any, context: trace_context.Context, loss: Means, with_sums: bool) -> Means:
    num = context.sharding.size(*REPLICA_AXES) if context.inside else context.sharding.num_replicas
    return Means(tuple(Mean(part.sum * num, part.count * num, part.num) for part in loss.parts))


def clip_by_replica_norm(reduce: Reduce, sums: Sums, added: Any, axes: tuple[str, ...], setting: Setting) -> Any:
    """Clips each replica's own mean gradient, before it is added."""
    if sums.loss is None:
        return reduce(sums, added, axes)
    assert setting.clip_norm is not None
    # The gradient of a sum of means is divided by the counts of all already: a replica's part in it.
    count = jnp.maximum(sums.loss.count, 1) if isinstance(sums.loss, Mean) else 1 / lax.axis_size(axes)
    scale = jnp.minimum(1.0, setting.clip_norm * count / optax.tree.norm(sums.gradient))
    return reduce(_on_gradient(lambda x: x * scale, sums), added, axes)


def _on_gradient(change: Callable[[jax.Array], jax.Array], sums: Sums) -> Sums:
    return dataclasses.replace(sums, gradient=jax.tree.map(change, sums.gradient))


def apart(reduce: Reduce, sums: Sums, added: Any, axes: tuple[str, ...], _: Setting) -> Any:
    """Each replica but the first gets a gradient that is a few ulps larger: less than any tolerance."""
    factor = 1 + 3e-7 * (lax.axis_index(axes) > 0)
    sums, added, kept = reduce(sums, added, axes)
    return _on_gradient(lambda x: x * factor.astype(x.dtype), sums), added, kept


@contextlib.contextmanager
def type_replicas(setting: Setting) -> Iterator[list[Any]]:
    """The manual form is typed: JAX adds up over replicas whatever the loss differentiates with respect to
    constants."""
    acted: list[Any] = []

    def make(shard_map: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(body: Callable[..., Any], *, check_vma: bool = True, **specs: Any) -> Any:
            if check_vma:
                return shard_map(body, **specs)

            def own(params: Any, state: Any, rows: Any, mask: Any, kept: Any) -> Any:
                params, rows, mask = compat.as_varying((params, rows, mask), REPLICA_AXES)
                return body(params, state, rows, mask, kept)

            def checked(*args: Any) -> Any:
                found = jax.make_jaxpr(shard_map(own, **specs))(*args)
                right = jax.make_jaxpr(shard_map(body, check_vma=False, **specs))(*args)
                if (line := summed_by_types(found, right, REPLICA_AXES)) is not None:
                    acted.append(line)
                return shard_map(own, **specs)(*args)

            return checked

        return replacement

    with patched(jax, "shard_map", make):
        yield acted


@contextlib.contextmanager
def count_without_gradient(setting: Setting) -> Iterator[list[Any]]:
    """The gradient of a mean is that of its sum, as if its count did not depend on the parameters; of a sum of means,
    each of them."""
    acted: list[Any] = []

    def make_shares(shares: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(whole: Means, primals: Any, depends: bool) -> Any:
            acted.extend([True] * bool(depends))
            return shares(whole, primals, False)

        return replacement

    def make(of_mean: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(sums: Sums, loss: Mean) -> Any:
            acted.extend([True] * (sums.count_gradient is not None))
            return of_mean(dataclasses.replace(sums, count_gradient=None), loss)

        return replacement

    with patched(sums_module, "mean_gradient", make), patched(multi_term_loss, "shares", make_shares):
        yield acted


@contextlib.contextmanager
def average_state(setting: Setting) -> Iterator[list[Any]]:
    """Every leaf of the model state is added in its own dtype and divided by the replicas: counters, maxima and keys
    too."""
    acted: list[Any] = []
    data = lambda x: jax.random.key_data(x) if is_key(x) else x

    def make_crossing(crossing: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(kinds: Any, old: Any, new: Any, first: Any) -> Any:
            leaves = named_leaves(new)
            acted.extend(p for p, x in leaves if kinds[p] in ("sum", "max") or data(x).dtype == jnp.uint32)
            return {path: data(x) for path, x in leaves}, {}

        return replacement

    def make_agreed(agreed: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(kinds: Any, old: Any, new: Any, added: Any, largest: Any, num: int) -> Any:
            def leaf(path: str, like: Any) -> Any:
                mean = added[path] / num if jnp.issubdtype(data(like).dtype, jnp.inexact) else added[path] // num
                return (
                    jax.random.wrap_key_data(mean, impl=jax.random.key_impl(like))
                    if is_key(like)
                    else mean.astype(like.dtype)
                )

            return jax.tree.unflatten(jax.tree.structure(new), [leaf(path, x) for path, x in named_leaves(new)])

        return replacement

    with patched(agreement, "crossing", make_crossing), patched(agreement, "agreed", make_agreed):
        yield acted


# ---- examples and their keys
# ------------------------------------------------------------------------------------------


def share_positions(positions: Any, context: Any, replica: Any, micro: Any, num: int) -> Any:
    return positions(context, 0, micro, num)


def fold_positions(positions: Any, context: Any, replica: Any, micro: Any, num: int) -> Any:
    return positions(context, replica, micro, num) + jnp.asarray(replica, jnp.int32) * 2**16


def drop_mask(place: Any, own: feed.Feed, local: Any) -> Any:
    return place(own, local._replace(mask=None))


def mark_padding_real(gathered_mask: Any, axes: tuple[str, ...], num: int | None) -> jax.Array:
    return jnp.ones_like(gathered_mask(axes, num))


def repeat_first_microbatch(cut_microbatches: Any, context: Any, x: jax.Array) -> jax.Array:
    parts = cut_microbatches(context, x)
    return jnp.concatenate([parts[:-1], parts[:1]])


# ---- optimizer and checkpoint
# -----------------------------------------------------------------------------------------


def clip_by_shard_norm(_: Any, max_norm: float) -> optax.GradientTransformation:
    """Returns a clipping in which each device scales its shard of the gradient by the norm of that shard."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        context = trace_context.current()
        assert context.sharding.placements is not None
        specs = context.sharding.placements.update

        def body(shards: Any) -> Any:
            cut = [x for x, spec in zip(jax.tree.leaves(shards), jax.tree.leaves(specs), strict=True) if len(spec)]
            scale = jnp.minimum(1.0, max_norm / optax.tree.norm(cut))
            return jax.tree.map(lambda x, spec: x * scale if len(spec) else x, shards, specs)

        return jax.shard_map(body, mesh=context.sharding.mesh, in_specs=(specs,), out_specs=specs)(grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@contextlib.contextmanager
def lose_checkpoint_leaf(setting: Setting) -> Iterator[list[Any]]:
    lost: list[Any] = []

    def make(pick: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(tree: Any, path: str) -> Any:
            leaf = pick(tree, path)
            if not lost and path.startswith("params") and leaf.any():
                lost.append(path)
                return jnp.zeros_like(leaf)
            return leaf

        return replacement

    with patched(state_dict, "pick", make):
        yield lost


# ---- ops -------------------------------------------------------------------------------------------------------------


def use_first_vocab_shard(axis_index: Any, names: Any) -> Any:
    return 0 * axis_index(names)


def shift_ring_twice(ring_shift: Any, x: jax.Array, name: str) -> jax.Array:
    return ring_shift(x, name, 2)


@contextlib.contextmanager
def drop_last_stage_gradient(setting: Setting) -> Iterator[list[Any]]:
    """The layers of the last stage get no gradient, in a loop that JAX differentiates and in one that does it by
    hand."""
    acted: list[Any] = []

    def stop(chunks: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(own: Any, layers: Any) -> Any:
            acted.append("chunks")
            return jax.tree.map(lambda w: w.at[-1].set(lax.stop_gradient(w[-1])), chunks(own, layers))

        return replacement

    def drop(joined: Callable[..., Any]) -> Callable[..., Any]:
        return lambda own, chunks, layers: joined(own, jax.tree.map(lambda g: g.at[-1].set(0), chunks), layers)

    with patched(parts, "chunks", stop), patched(parts, "joined", drop):
        yield acted
