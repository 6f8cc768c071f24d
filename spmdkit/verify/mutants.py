"""Mutants: the program with one known mistake. A comparison that misses one of them proves nothing.

A mutant applies only if the task and the mesh use the code that it changes. Otherwise it is not applicable, with the
reason. mutations.py has the mistakes and how they get into a program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import optax

from spmdkit.data import feed
from spmdkit.ops import ring_attention, vocab
from spmdkit.step import gradient, replica_collectives
from spmdkit.step.metrics import mean
from spmdkit.verify import mutations
from spmdkit.verify.mutations import MutationContext
from spmdkit.verify.task_runner import Setting


@dataclasses.dataclass(frozen=True)
class TaskFacts:
    """Facts about the task, from its reference run.

    Attributes:
        num_devices: of the meshes.
        uses: spmdkit functions that the task called.
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
        description: the mistake in words.
        settings: the settings to try, in order, or the reason why there are none.
        apply: a context in which the program of a setting contains the mistake. Yields a list that is not empty once
            the changed function was called.
        unused: the reason for "not applicable" if the function is not called.
        no_effect: the reason for "not applicable" if the mistake changes no number beyond rounding; empty: it always
            does.
        restore: it acts on the state in a checkpoint.
        traced: the function is called while a program is traced, so a program without the call need not run.
    """

    name: str
    description: str
    settings: Settings
    apply: Callable[[Setting], MutationContext]
    unused: str = "the task's train_step does its own reduction"
    no_effect: str = ""
    restore: bool = False
    traced: bool = True


# ---- settings


def _replicas(short: bool = False, needs: str = "") -> Settings:
    """Returns the settings of replicas alone, of a task that calls `needs`."""

    def settings(known: TaskFacts) -> list[Setting] | str:
        if needs and needs not in known.uses:
            return f"the task does not use sk.{needs}"
        return [Setting({axis: known.num_devices}, short=short) for axis in ("data", "replica")]

    return settings


def _two_replica_axes(known: TaskFacts) -> list[Setting] | str:
    half = known.num_devices // 2
    return [Setting({"replica": 2, "data": half})] if half > 1 else "two replica axes need at least four devices"


def _replicas_clipped(known: TaskFacts) -> list[Setting] | str:
    return [Setting({"data": known.num_devices}, clip_norm=known.gradient_norm / 2)]


def _shards_clipped(known: TaskFacts) -> list[Setting] | str:
    num, clip_norm = known.num_devices, known.gradient_norm / 2
    meshes = [{"fsdp": num}, {"data": num // 2, "fsdp": 2}]
    return [Setting(mesh, clip_norm=clip_norm) for mesh in meshes]


def _accumulating(known: TaskFacts) -> list[Setting] | str:
    return [Setting({axis: known.num_devices}, microbatches=2) for axis in ("data", "fsdp")]


def _sharded_over(axis: str, needs: str = "", otherwise: str = "") -> Settings:
    """Returns the settings with a model axis larger than one; for a task that does not call `needs`, the reason
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
NO_COLLECTIVE_EFFECT = "the sums over replicas in the loss change no number"

MUTANTS = (
    Mutant("reduction_dropped", "every replica uses its own sums", _replicas(), mutations.reducing(mutations.dropped)),
    Mutant(
        "reduction_doubled",
        "the gradient is added over replicas twice",
        _replicas(),
        mutations.reducing(mutations.doubled),
    ),
    Mutant(
        "reduction_over_wrong_axis",
        "the reduction skips one replica axis",
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
        "each replica's gradient differs by a few ulps",
        _replicas(),
        mutations.reducing(mutations.apart),
    ),
    Mutant(
        "constant_summed",
        "a derivative with respect to a constant is summed over replicas",
        _replicas(),
        mutations.type_replicas,
        unused="the loss takes no derivative with respect to a constant",
        no_effect="the sums of the loss's derivatives with respect to constants are zero or change nothing",
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
        "every replica draws the same numbers",
        _replicas(needs="example_keys"),
        mutations.seam(gradient, "positions", mutations.share_positions),
    ),
    Mutant(
        "key_folded_by_device",
        "the drawn numbers depend on the device",
        _replicas(needs="example_keys"),
        mutations.seam(gradient, "positions", mutations.fold_positions),
    ),
    Mutant(
        "duplicate_padding",
        "padding rows of a short batch count",
        _replicas(short=True),
        mutations.seam(feed, "place", mutations.drop_mask),
        traced=False,
    ),
    Mutant(
        "padding_gathered",
        "padding rows of a short batch are among the gathered negatives",
        _replicas(short=True, needs="all_gather"),
        mutations.seam(replica_collectives, "gathered_mask", mutations.mark_padding_real),
        unused="the loss does not request the mask of the gathered rows",
    ),
    Mutant(
        "batch_statistics_per_replica",
        "sums over replicas inside the loss are skipped",
        _replicas(),
        mutations.local_statistics,
        unused="the loss has no collective over replicas",
        no_effect=NO_COLLECTIVE_EFFECT,
    ),
    Mutant(
        "statistics_of_first_replica",
        "sums over replicas inside the loss are replaced by the first replica's value",
        _replicas(),
        mutations.first_statistics,
        unused="the loss has no collective over replicas",
        no_effect=NO_COLLECTIVE_EFFECT,
    ),
    Mutant(
        "mean_over_shard",
        "each replica passes sk.mean a mean instead of values",
        _replicas(short=True),
        mutations.in_loss(mutations.shard_mean),
        unused="the loss is not an sk.mean",
    ),
    Mutant(
        "example_keys_forgotten",
        "examples draw from the loss's plain key",
        _replicas(needs="example_keys"),
        mutations.in_loss(mutations.fold_by_local_row),
    ),
    Mutant(
        "padding_among_examples",
        "the task's mask includes padding rows",
        _replicas(short=True, needs="example_mask"),
        mutations.seam(mean, "required", mutations.unmasked),
    ),
    Mutant(
        "microbatch_twice",
        "the last microbatch repeats the first",
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
        "each device uses its part of the vocabulary as the first part",
        _sharded_over("tensor"),
        mutations.seam(vocab, "axis_index", mutations.use_first_vocab_shard),
        unused="the loss uses neither sk.embed nor sk.cross_entropy",
    ),
    Mutant(
        "wrong_ring_step",
        "keys and values skip a device of the ring",
        _sharded_over("context", "attention", NO_RING),
        mutations.seam(ring_attention, "ring_shift", mutations.shift_ring_twice),
        unused=NO_RING,
    ),
    Mutant(
        "stage_gradient_dropped",
        "the layers of the last stage get no gradient",
        _sharded_over("pipeline", "pipeline", NO_PIPELINE),
        mutations.drop_last_stage_gradient,
        unused=NO_PIPELINE,
    ),
    Mutant(
        "checkpoint_loses_leaf",
        "one leaf is restored as zeros",
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
