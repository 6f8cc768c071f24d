"""Mutants: the program with one known mistake in it. A comparison that lets one of them through proves nothing.

Each mutant replaces one well-named function of the package while a program is traced and run; nothing in the package knows of it.

    seam                               what passes through it
    reducers.get                       everything that is added over replicas: sums and counts, gradient, model state
    gradient._positions                places of a replica's examples in the global batch, from which example keys are made
    gradient._local_gradient           the user's loss on one replica
    gradient._cut_microbatches         the parts of a batch
    feed.Feed._place                   the mask of a short batch
    optax.clip_by_global_norm          the clipping that `clip_norm` asks for
    checkpoint.leaves.pick             each leaf that a checkpoint gives back
    ops.vocab.axis_index               which part of the vocabulary a device holds

A mutant acts only where its seam is used by the task and the mesh (`needs`); elsewhere it is not applicable, with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from spmdkit import feed, gradient, reducers, scope
from spmdkit.checkpoint import leaves
from spmdkit.means import Mean
from spmdkit.mesh import REPLICA_AXES
from spmdkit.ops import vocab
from spmdkit.verify.subject import Setting


@dataclasses.dataclass(frozen=True)
class Known:
    """What a mutant may know about the task, from its reference run.

    Attributes:
        num_devices: of the meshes.
        uses: spmdkit's functions that the task called.
        gradient_norm: global norm of the first gradient.
    """

    num_devices: int
    uses: frozenset[str]
    gradient_norm: float


Settings = Callable[[Known], list[Setting] | str]
Acting = contextlib.AbstractContextManager[list[Any]]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: in the table and in the JSON.
        does: the mistake in words.
        settings: where it can act: settings to try in order, or the reason why there is none.
        apply: a context in which the mistake is in the program of a setting. Yields a list that holds something once the
            seam was used.
        unused: why it is not applicable where the seam was not used.
        restore: it acts where the state goes through a checkpoint.
    """

    name: str
    does: str
    settings: Settings
    apply: Callable[[Setting], Acting]
    unused: str = "the task's own step reduces by itself"
    restore: bool = False


# ---- where ------------------------------------------------------------------------------------------------------------


def _replicas(short: bool = False) -> Settings:
    def settings(known: Known) -> list[Setting] | str:
        return [Setting({axis: known.num_devices}, short=short) for axis in ("data", "replica")]

    return settings


def _two_replica_axes(known: Known) -> list[Setting] | str:
    half = known.num_devices // 2
    return [Setting({"replica": 2, "data": half})] if half > 1 else "two replica axes need at least four devices"


def _with_example_keys(known: Known) -> list[Setting] | str:
    return _replicas()(known) if "example_keys" in known.uses else "the task draws nothing from sk.example_keys"


def _replicas_clipped(known: Known) -> list[Setting] | str:
    return [Setting({"data": known.num_devices}, clip_norm=known.gradient_norm / 2)]


def _shards_clipped(known: Known) -> list[Setting] | str:
    num, clip_norm = known.num_devices, known.gradient_norm / 2
    meshes = [{"fsdp": num}, {"data": num // 2, "fsdp": 2}]
    return [Setting(mesh, clip_norm=clip_norm) for mesh in meshes]


def _accumulating(known: Known) -> list[Setting] | str:
    return [Setting({axis: known.num_devices}, microbatches=2) for axis in ("data", "fsdp")]


def _cut(axis: str) -> Settings:
    """Returns the settings in which a model axis is larger than one."""

    def settings(known: Known) -> list[Setting] | str:
        num = known.num_devices
        meshes = [{"data": num // 2, axis: 2}, {"data": num // 4, axis: 4}, {axis: num}]
        return [Setting({a: n for a, n in mesh.items() if n > 1}) for mesh in meshes if 0 not in mesh.values()]

    return settings


# ---- seams ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces `owner.name` by `make(the original)` while the body runs.

    Raises:
        AttributeError: the seam is not there any more.
    """
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def seam(owner: Any, name: str, wrong: Callable[..., Any]) -> Callable[[Setting], Acting]:
    """Returns a mutant's `apply`: `wrong(original, *arguments)` instead of `owner.name(*arguments)`."""

    @contextlib.contextmanager
    def apply(setting: Setting) -> Iterator[list[Any]]:
        acted: list[Any] = []

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def instead(*args: Any, **kwargs: Any) -> Any:
                acted.append(name)
                return wrong(original, *args, **kwargs)

            return instead

        with patched(owner, name, make):
            yield acted

    return apply


# ---- reductions -------------------------------------------------------------------------------------------------------

Reduce = Callable[[Any, tuple[str, ...]], Any]


def _reducing(mistake: Callable[[Reduce, Any, tuple[str, ...], Setting], Any]) -> Callable[[Setting], Acting]:
    """Returns a mutant's `apply`: `mistake(reduce, tree, axes, setting)` instead of `reduce(tree, axes)`."""

    @contextlib.contextmanager
    def apply(setting: Setting) -> Iterator[list[Any]]:
        acted: list[Any] = []

        def make(get: Callable[..., Reduce]) -> Callable[..., Reduce]:
            def instead(*asked: Any) -> Reduce:
                reduce = get(*asked)

                def wrong(tree: Any, axes: tuple[str, ...]) -> Any:
                    acted.append(axes)
                    return mistake(reduce, tree, axes, setting)

                return wrong

            return instead

        with patched(reducers, "get", make):
            yield acted

    return apply


def _dropped(reduce: Reduce, tree: Any, axes: tuple[str, ...], _: Setting) -> Any:
    return jax.tree.map(lambda x: _first_only(x, axes), tree)


def _first_only(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns what the first device along `axes` holds, on all of them: what is read of an array that was never reduced."""
    return lax.psum(jnp.where(lax.axis_index(axes) == 0, x, jnp.zeros_like(x)), axes)


def _doubled(reduce: Reduce, tree: Any, axes: tuple[str, ...], _: Setting) -> Any:
    return _on_gradient(lambda x: x * lax.axis_size(axes), reduce(tree, axes))


def _over_wrong_axis(reduce: Reduce, tree: Any, axes: tuple[str, ...], _: Setting) -> Any:
    """Adds over the last of the replica axes alone; along the others the first device's part is what is read."""
    partial = reduce(tree, axes[-1:])
    return jax.tree.map(lambda x: _first_only(x, axes[:-1]), partial)


def _mean_of_means(reduce: Reduce, tree: Any, axes: tuple[str, ...], _: Setting) -> Any:
    """Divides by each replica's own count, and then takes the plain mean of the replicas."""
    if (sums := _gradient_sums(tree)) is None:
        return reduce(tree, axes)
    count = sums[0].count
    factor = lax.psum(count, axes) / lax.axis_size(axes) / jnp.maximum(count, 1)
    return reduce(_on_gradient(lambda x: x * factor, tree), axes)


def _clipped_by_replica(reduce: Reduce, tree: Any, axes: tuple[str, ...], setting: Setting) -> Any:
    """Clips each replica's own mean gradient, before it is added."""
    if (sums := _gradient_sums(tree)) is None:
        return reduce(tree, axes)
    assert setting.clip_norm is not None
    scale = jnp.minimum(1.0, setting.clip_norm * jnp.maximum(sums[0].count, 1) / optax.tree.norm(sums[2]))
    return reduce(_on_gradient(lambda x: x * scale, tree), axes)


def _gradient_sums(tree: Any) -> tuple[Mean, Any, Any] | None:
    """Returns `(loss, metrics, gradient)` of what a reducer is given: that alone, or with the model state; None in an evaluation."""
    if isinstance(tree, tuple) and isinstance(tree[0], tuple):
        return _gradient_sums(tree[0])
    return tree if isinstance(tree, tuple) and isinstance(tree[0], Mean) else None


def _on_gradient(change: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    if (sums := _gradient_sums(tree)) is None:
        return tree
    changed = (*sums[:2], jax.tree.map(change, sums[2]))
    return changed if sums is tree else (changed, *tree[1:])


# ---- examples and their keys ------------------------------------------------------------------------------------------


def _shared_positions(positions: Any, step: Any, replica: Any, micro: Any, num: int) -> Any:
    return positions(step, 0, micro, num)


def _folded_positions(positions: Any, step: Any, replica: Any, micro: Any, num: int) -> Any:
    return positions(step, replica, micro, num) + jnp.asarray(replica, jnp.int32) * 2**16


def _without_mask(place: Any, own: feed.Feed, local: Any) -> Any:
    return place(own, local._replace(mask=None))


def _first_microbatch_twice(cut: Any, step: Any, x: jax.Array) -> jax.Array:
    parts = cut(step, x)
    return jnp.concatenate([parts[:-1], parts[:1]])


@contextlib.contextmanager
def _local_statistics(setting: Setting) -> Iterator[list[Any]]:
    """Sums and means over replicas that the user's loss asks for give the replica's own value."""
    acted: list[Any] = []

    def alone(collective: Callable[..., Any]) -> Callable[..., Any]:
        def instead(x: Any, axis_name: Any, **kwargs: Any) -> Any:
            names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
            if not set(names) <= set(REPLICA_AXES):
                return collective(x, axis_name, **kwargs)
            acted.append(names)
            return x

        return instead

    def make(local_gradient: Callable[..., Any]) -> Callable[..., Any]:
        def instead(loss_fn: Callable[..., Any], *rest: Any) -> Any:
            def loss(*args: Any) -> Any:
                with patched(lax, "psum", alone), patched(lax, "pmean", alone):
                    return loss_fn(*args)

            return local_gradient(loss, *rest)

        return instead

    with patched(gradient, "_local_gradient", make):
        yield acted


# ---- optimizer and checkpoint -----------------------------------------------------------------------------------------


def _clip_by_shard(_: Any, max_norm: float) -> optax.GradientTransformation:
    """Returns a clipping in which each device scales its shard of the gradient by the norm of that shard."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        step = scope.current_step()
        assert step.placements is not None
        specs = step.placements.update

        def body(shards: Any) -> Any:
            cut = [x for x, spec in zip(jax.tree.leaves(shards), jax.tree.leaves(specs), strict=True) if len(spec)]
            scale = jnp.minimum(1.0, max_norm / optax.tree.norm(cut))
            return jax.tree.map(lambda x, spec: x * scale if len(spec) else x, shards, specs)

        return jax.shard_map(body, mesh=step.mesh, in_specs=(specs,), out_specs=specs)(grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@contextlib.contextmanager
def _losing_a_leaf(setting: Setting) -> Iterator[list[Any]]:
    lost: list[Any] = []

    def make(pick: Callable[..., Any]) -> Callable[..., Any]:
        def instead(tree: Any, path: str) -> Any:
            leaf = pick(tree, path)
            if not lost and path.startswith("params") and leaf.any():
                lost.append(path)
                return jnp.zeros_like(leaf)
            return leaf

        return instead

    with patched(leaves, "pick", make):
        yield lost


# ---- ops --------------------------------------------------------------------------------------------------------------


def _first_part(axis_index: Any, names: Any) -> Any:
    return 0 * axis_index(names)


MUTANTS = (
    Mutant("reduction_dropped", "every replica keeps its own sums", _replicas(), _reducing(_dropped)),
    Mutant("reduction_doubled", "the gradient is added over replicas twice", _replicas(), _reducing(_doubled)),
    Mutant(
        "reduction_over_wrong_axis", "one replica axis is forgotten", _two_replica_axes, _reducing(_over_wrong_axis)
    ),
    Mutant(
        "mean_of_means",
        "the gradient is a mean of the replicas' means",
        _replicas(short=True),
        _reducing(_mean_of_means),
    ),
    Mutant(
        "key_shared_by_replicas",
        "every replica draws the same",
        _with_example_keys,
        seam(gradient, "_positions", _shared_positions),
    ),
    Mutant(
        "key_folded_by_device",
        "what is drawn depends on the device",
        _with_example_keys,
        seam(gradient, "_positions", _folded_positions),
    ),
    Mutant(
        "duplicate_padding",
        "rows that fill up a short batch count",
        _replicas(short=True),
        seam(feed.Feed, "_place", _without_mask),
    ),
    Mutant(
        "batch_statistics_per_replica",
        "sums over replicas inside the loss are left out",
        _replicas(),
        _local_statistics,
        unused="the loss has no collective over replicas",
    ),
    Mutant(
        "microbatch_twice",
        "the last microbatch is the first one again",
        _accumulating,
        seam(gradient, "_cut_microbatches", _first_microbatch_twice),
    ),
    Mutant(
        "clip_by_replica_norm",
        "each replica clips by the norm of its own gradient",
        _replicas_clipped,
        _reducing(_clipped_by_replica),
    ),
    Mutant(
        "clip_by_shard_norm",
        "each device clips by the norm of its shard",
        _shards_clipped,
        seam(optax, "clip_by_global_norm", _clip_by_shard),
    ),
    Mutant(
        "vocabulary_offset",
        "each device takes its part of the vocabulary for the first",
        _cut("tensor"),
        seam(vocab, "axis_index", _first_part),
        unused="the loss uses neither sk.embed nor sk.cross_entropy",
    ),
    Mutant(
        "checkpoint_loses_leaf",
        "one leaf comes back as zeros",
        lambda known: [Setting({"data": known.num_devices})],
        _losing_a_leaf,
        restore=True,
    ),
)
"""Every mutant, in the order of the table."""


def by_name(name: str) -> Mutant:
    """Returns the mutant called `name`."""
    return next(mutant for mutant in MUTANTS if mutant.name == name)
