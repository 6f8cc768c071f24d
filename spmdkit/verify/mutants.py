"""Mutants: the program with one known mistake in it. A comparison that lets one of them through proves nothing.

A mutant acts only where the task and the mesh use what it changes; elsewhere it is not applicable, with the reason. The
mistakes themselves, and how they get into a program, are in mutations.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import optax

from spmdkit.data import feed
from spmdkit.ops import ring_attention, vocab
from spmdkit.step import gradient, replica_collectives
from spmdkit.step.metrics import mean
from spmdkit.verify import mutations, user_mistakes
from spmdkit.verify.mutations import MutationContext
from spmdkit.verify.task_runner import Setting


@dataclasses.dataclass(frozen=True)
class TaskFacts:
    """What a mutant may know about the task, from its reference run.

    Attributes:
        num_devices: of the meshes.
        uses: spmdkit's functions that the task called.
        gradient_norm: global norm of the first gradient.
    """

    num_devices: int
    uses: frozenset[str]
    gradient_norm: float


Settings = Callable[[TaskFacts], list[Setting] | str]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: in the table and in the JSON.
        does: the mistake in words.
        settings: where it can act: settings to try in order, or the reason why there is none.
        apply: a context in which the mistake is in the program of a setting. Yields a list that holds something once
            the seam was used.
        unused: why it is not applicable where the seam was not used.
        idle: why it is not applicable where it is in the program and changes no number beyond rounding; empty: it
            always does.
        restore: it acts where the state goes through a checkpoint.
        traced: its seam is used while a program is traced, so that one in which it is not need not be run.
    """

    name: str
    does: str
    settings: Settings
    apply: Callable[[Setting], MutationContext]
    unused: str = "the task's own step reduces by itself"
    idle: str = ""
    restore: bool = False
    traced: bool = True


# ---- where ------------------------------------------------------------------------------------------------------------


def _replicas(short: bool = False) -> Settings:
    def settings(known: TaskFacts) -> list[Setting] | str:
        return [Setting({axis: known.num_devices}, short=short) for axis in ("data", "replica")]

    return settings


def _two_replica_axes(known: TaskFacts) -> list[Setting] | str:
    half = known.num_devices // 2
    return [Setting({"replica": 2, "data": half})] if half > 1 else "two replica axes need at least four devices"


def _with_example_keys(known: TaskFacts) -> list[Setting] | str:
    return _replicas()(known) if "example_keys" in known.uses else "the task draws nothing from sk.example_keys"


def _with_gathered_rows(known: TaskFacts) -> list[Setting] | str:
    return _replicas(short=True)(known) if "all_gather" in known.uses else "the loss gathers no rows by sk.all_gather"


def _with_example_mask(known: TaskFacts) -> list[Setting] | str:
    return _replicas(short=True)(known) if "example_mask" in known.uses else "the task does not use sk.example_mask"


def _replicas_clipped(known: TaskFacts) -> list[Setting] | str:
    return [Setting({"data": known.num_devices}, clip_norm=known.gradient_norm / 2)]


def _shards_clipped(known: TaskFacts) -> list[Setting] | str:
    num, clip_norm = known.num_devices, known.gradient_norm / 2
    meshes = [{"fsdp": num}, {"data": num // 2, "fsdp": 2}]
    return [Setting(mesh, clip_norm=clip_norm) for mesh in meshes]


def _accumulating(known: TaskFacts) -> list[Setting] | str:
    return [Setting({axis: known.num_devices}, microbatches=2) for axis in ("data", "fsdp")]


def _cut(axis: str, needs: str = "", otherwise: str = "") -> Settings:
    """Returns the settings in which a model axis is larger than one; of a task that does not call `needs`, what it is
    `otherwise`."""

    def settings(known: TaskFacts) -> list[Setting] | str:
        if needs and needs not in known.uses:
            return otherwise
        num = known.num_devices
        meshes = [{"data": num // 2, axis: 2}, {"data": num // 4, axis: 4}, {axis: num}]
        return [Setting({a: n for a, n in mesh.items() if n > 1}) for mesh in meshes if 0 not in mesh.values()]

    return settings


NO_RING = "the loss uses no ring: sk.attention with attention.context: ring"
NO_PIPELINE = "the loss uses no sk.pipeline"
SAME_ALONE = "what the loss adds over replicas changes no number"

MUTANTS = (
    Mutant("reduction_dropped", "every replica keeps its own sums", _replicas(), mutations.reducing(mutations.dropped)),
    Mutant(
        "reduction_doubled",
        "the gradient is added over replicas twice",
        _replicas(),
        mutations.reducing(mutations.doubled),
    ),
    Mutant(
        "reduction_over_wrong_axis",
        "one replica axis is forgotten",
        _two_replica_axes,
        mutations.reducing(mutations.reduce_over_wrong_axis),
    ),
    Mutant(
        "mean_of_means",
        "the gradient is a mean of the replicas' means",
        _replicas(short=True),
        mutations.mean_of_means,
    ),
    Mutant(
        "replicas_apart",
        "each replica's gradient is a few ulps another one",
        _replicas(),
        mutations.reducing(mutations.apart),
    ),
    Mutant(
        "constant_summed",
        "a derivative with respect to a constant is added up over replicas",
        _replicas(),
        mutations.type_replicas,
        unused="the loss takes no derivative with respect to a constant",
        idle="what is added up in the loss's derivatives with respect to constants is zero, or the same without",
    ),
    Mutant(
        "count_without_gradient",
        "the count of the loss has no gradient",
        _replicas(),
        mutations.count_without_gradient,
        unused="the count of the loss does not depend on the parameters",
    ),
    Mutant(
        "state_averaged",
        "counters, maxima and keys of the model state are averaged",
        _replicas(),
        mutations.average_state,
        unused="the model state has no counter, maximum or key that an average would change",
    ),
    Mutant(
        "key_shared_by_replicas",
        "every replica draws the same",
        _with_example_keys,
        mutations.seam(gradient, "positions", mutations.share_positions),
    ),
    Mutant(
        "key_folded_by_device",
        "what is drawn depends on the device",
        _with_example_keys,
        mutations.seam(gradient, "positions", mutations.fold_positions),
    ),
    Mutant(
        "duplicate_padding",
        "rows that fill up a short batch count",
        _replicas(short=True),
        mutations.seam(feed, "place", mutations.drop_mask),
        traced=False,
    ),
    Mutant(
        "padding_gathered",
        "rows that fill up a short batch are among everybody's, as negatives",
        _with_gathered_rows,
        mutations.seam(replica_collectives, "gathered_mask", mutations.mark_padding_real),
        unused="the loss asks for no mask of everybody's rows",
    ),
    Mutant(
        "batch_statistics_per_replica",
        "sums over replicas inside the loss are left out",
        _replicas(),
        user_mistakes.local_statistics,
        unused="the loss has no collective over replicas",
        idle=SAME_ALONE,
    ),
    Mutant(
        "statistics_of_first_replica",
        "sums over replicas inside the loss are the first replica's",
        _replicas(),
        user_mistakes.first_statistics,
        unused="the loss has no collective over replicas",
        idle=SAME_ALONE,
    ),
    Mutant(
        "mean_over_shard",
        "the loss is a mean that each replica has taken already",
        _replicas(short=True),
        user_mistakes.in_loss(user_mistakes.shard_mean),
        unused="the loss is no sk.mean",
    ),
    Mutant(
        "example_keys_forgotten",
        "examples draw from the loss's plain key",
        _with_example_keys,
        user_mistakes.in_loss(user_mistakes.fold_by_local_row),
    ),
    Mutant(
        "padding_among_examples",
        "the task's own mask has padding rows in it",
        _with_example_mask,
        mutations.seam(mean, "required", user_mistakes.unmasked),
    ),
    Mutant(
        "microbatch_twice",
        "the last microbatch is the first one again",
        _accumulating,
        mutations.seam(gradient, "cut_microbatches", mutations.repeat_first_microbatch),
    ),
    Mutant(
        "clip_by_replica_norm",
        "each replica clips by the norm of its own gradient",
        _replicas_clipped,
        mutations.reducing(mutations.clip_by_replica_norm),
    ),
    Mutant(
        "clip_by_shard_norm",
        "each device clips by the norm of its shard",
        _shards_clipped,
        mutations.seam(optax, "clip_by_global_norm", mutations.clip_by_shard_norm),
    ),
    Mutant(
        "vocabulary_offset",
        "each device takes its part of the vocabulary for the first",
        _cut("tensor"),
        mutations.seam(vocab, "axis_index", mutations.use_first_vocab_shard),
        unused="the loss uses neither sk.embed nor sk.cross_entropy",
    ),
    Mutant(
        "wrong_ring_step",
        "keys and values skip a device of the ring",
        _cut("context", "attention", NO_RING),
        mutations.seam(ring_attention, "ring_shift", mutations.shift_ring_twice),
        unused=NO_RING,
    ),
    Mutant(
        "stage_gradient_dropped",
        "the layers of the last stage get no gradient",
        _cut("pipeline", "pipeline", NO_PIPELINE),
        mutations.drop_last_stage_gradient,
        unused=NO_PIPELINE,
    ),
    Mutant(
        "checkpoint_loses_leaf",
        "one leaf comes back as zeros",
        lambda known: [Setting({"data": known.num_devices})],
        mutations.lose_checkpoint_leaf,
        restore=True,
        traced=False,
    ),
)
"""Every mutant, in the order of the table."""


def by_name(name: str) -> Mutant:
    """Returns the mutant called `name`."""
    return next(mutant for mutant in MUTANTS if mutant.name == name)
