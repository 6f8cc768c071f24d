"""Mutants: the program with one injected bug. A comparison that misses a mutant is not reliable.

A mutant applies only if the task and the mesh use the code it changes. Otherwise it is reported as not applicable, with
the reason. mutations.py contains the bugs and injects them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from spmdkit.data import feed
from spmdkit.ops import ring_attention, vocab
from spmdkit.program import init_state
from spmdkit.step import gradient, replica_collectives
from spmdkit.step.metrics import mean
from spmdkit.verify import mutations
from spmdkit.verify.mutations import MutationContext
from spmdkit.verify.task_runner import Setting


@dataclasses.dataclass(frozen=True)
class TaskFacts:
    """Facts about the task, from its reference run.

    Attributes:
        num_devices: number of devices of the meshes.
        uses: spmdkit functions that the task called.
        gradient_norm: global norm of the first gradient.
    """

    num_devices: int
    uses: frozenset[str]
    gradient_norm: float


Meshes = Callable[[int], list[dict[str, int]]]
"""Number of devices -> the meshes to try, in order."""


def _replicas(num: int) -> list[dict[str, int]]:
    return [{"data": num}, {"replica": num}]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One injected bug.

    Attributes:
        apply: a context in which the program of a setting contains the bug. Yields a list that is not empty once the
            changed function was called.
        needs: the spmdkit function that the task must use for the mutant to apply.
        clipped: the setting clips the gradient by its global norm.
        unused: the reason for "not applicable" if the function is not called.
        no_effect: the reason for "not applicable" if the bug changes no number beyond rounding; empty if it always
            changes one.
        restore: the bug changes the state in a checkpoint.
        traced: the function is called while a program is traced, so a program without the call need not run.
    """

    name: str
    description: str
    apply: Callable[[Setting], MutationContext]
    meshes: Meshes = _replicas
    needs: str = ""
    short: bool = False
    microbatches: int = 1
    clipped: bool = False
    unused: str = "the task's train_step does its own reduction"
    no_effect: str = ""
    restore: bool = False
    traced: bool = True

    def settings(self, known: TaskFacts) -> list[Setting] | str:
        """Returns the settings to try, in order, or the reason why the mutant has none."""
        if self.needs and self.needs not in known.uses:
            return f"the task does not use sk.{self.needs}"
        clip_norm = known.gradient_norm / 2 if self.clipped else None
        settings = [Setting(m, self.microbatches, self.short, clip_norm) for m in self.meshes(known.num_devices)]
        return settings or "two replica axes need at least four devices"


def _two_replica_axes(num: int) -> list[dict[str, int]]:
    return [{"replica": 2, "data": num // 2}] if num > 3 else []


def _sharded_over(axis: str) -> Meshes:
    """Returns a function that lists the meshes with model axis `axis` larger than one."""

    def meshes(num: int) -> list[dict[str, int]]:
        found = [{"data": num // 2, axis: 2}, {"data": num // 4, axis: 4}, {axis: num}]
        return [{a: n for a, n in mesh.items() if n > 1} for mesh in found if 0 not in mesh.values()]

    return meshes


NO_COLLECTIVE_EFFECT = "the sums over replicas in the loss change no number"

MUTANTS = (
    Mutant("reduction_dropped", "each replica uses its local sums", mutations.reducing(mutations.dropped)),
    Mutant(
        "reduction_doubled",
        "the gradient is summed over replicas twice",
        mutations.reducing(mutations.doubled),
    ),
    Mutant(
        "reduction_over_wrong_axis",
        "the reduction skips one replica axis",
        mutations.reducing(mutations.reduce_over_wrong_axis),
        meshes=_two_replica_axes,
    ),
    Mutant(
        "mean_of_means",
        "the gradient is a mean of the replicas' means",
        mutations.mean_of_means,
        short=True,
    ),
    Mutant(
        "replicas_apart",
        "each replica's gradient differs by a few ulps",
        mutations.reducing(mutations.apart),
    ),
    Mutant(
        "constant_summed",
        "a derivative with respect to a constant is summed over replicas",
        mutations.type_replicas,
        unused="the loss takes no derivative with respect to a constant",
        no_effect="the sums of the loss's derivatives with respect to constants are zero or change nothing",
    ),
    Mutant(
        "count_without_gradient",
        "the count of the loss has no gradient",
        mutations.count_without_gradient,
        unused="the count of the loss does not depend on the parameters",
    ),
    Mutant(
        "state_averaged",
        "counters, maxima and keys of the model state are averaged",
        mutations.average_state,
        unused="the model state has no counter, maximum or key that an average would change",
    ),
    Mutant(
        "key_shared_by_replicas",
        "all replicas draw the same random numbers",
        mutations.seam(gradient, "positions", mutations.share_positions),
        needs="example_keys",
    ),
    Mutant(
        "key_folded_by_device",
        "random numbers depend on the device",
        mutations.seam(gradient, "positions", mutations.fold_positions),
        needs="example_keys",
    ),
    Mutant(
        "duplicate_padding",
        "padding rows of a short batch count as examples",
        mutations.seam(feed, "place", mutations.drop_mask),
        traced=False,
        short=True,
    ),
    Mutant(
        "rows_of_first_replica",
        "all replicas train on the rows of the first one",
        mutations.repeat_first_rows,
        traced=False,
        no_effect="the step reads no rows, or all rows are equal",
    ),
    Mutant(
        "padding_gathered",
        "padding rows of a short batch are among the gathered negatives",
        mutations.seam(replica_collectives, "gathered_mask", mutations.mark_padding_real),
        unused="the loss does not request the mask of the gathered rows",
        needs="all_gather",
        short=True,
    ),
    Mutant(
        "batch_statistics_per_replica",
        "sums over replicas inside the loss are skipped",
        mutations.local_statistics,
        unused="the loss has no collective over replicas",
        no_effect=NO_COLLECTIVE_EFFECT,
    ),
    Mutant(
        "statistics_of_first_replica",
        "sums over replicas inside the loss are replaced by the first replica's value",
        mutations.first_statistics,
        unused="the loss has no collective over replicas",
        no_effect=NO_COLLECTIVE_EFFECT,
    ),
    Mutant(
        "mean_over_shard",
        "each replica passes sk.mean its local mean, not its values",
        mutations.in_loss(mutations.shard_mean),
        unused="the loss is not an sk.mean",
        short=True,
    ),
    Mutant(
        "example_keys_forgotten",
        "examples use the key of the loss, folded with the local row",
        mutations.in_loss(mutations.fold_by_local_row),
        needs="example_keys",
    ),
    Mutant(
        "padding_among_examples",
        "the task's mask includes padding rows",
        mutations.seam(mean, "required", mutations.unmasked),
        needs="example_mask",
        short=True,
    ),
    Mutant(
        "microbatch_twice",
        "the last microbatch repeats the first",
        mutations.seam(gradient, "split_microbatches", mutations.repeat_first_microbatch),
        meshes=lambda num: [{"data": num}, {"fsdp": num}],
        microbatches=2,
        no_effect="the loss does not depend on the batch",
    ),
    Mutant(
        "clip_by_replica_norm",
        "each replica clips by the norm of its own gradient",
        mutations.reducing(mutations.clip_by_replica_norm),
        meshes=lambda num: [{"data": num}],
        clipped=True,
    ),
    Mutant(
        "clip_by_shard_norm",
        "each device clips by the norm of its shard",
        mutations.seam(init_state, "clip_by_global_norm", mutations.clip_by_shard_norm),
        meshes=lambda num: [{"fsdp": num}, {"data": num // 2, "fsdp": 2}],
        clipped=True,
    ),
    Mutant(
        "vocabulary_offset",
        "each device treats its vocabulary shard as the first one",
        mutations.seam(vocab, "axis_index", mutations.use_first_vocab_shard),
        meshes=_sharded_over("tensor"),
        unused="the loss uses neither sk.embed nor sk.cross_entropy",
    ),
    Mutant(
        "wrong_ring_step",
        "keys and values move two devices per step of the ring",
        mutations.seam(ring_attention, "ring_shift", mutations.shift_ring_twice),
        meshes=_sharded_over("context"),
        unused="the loss uses no ring: sk.attention with attention.context: ring",
        needs="attention",
    ),
    Mutant(
        "stage_gradient_dropped",
        "the layers of the last stage get no gradient",
        mutations.drop_last_stage_gradient,
        meshes=_sharded_over("pipeline"),
        unused="the loss uses no sk.pipeline",
        needs="pipeline",
    ),
    Mutant(
        "checkpoint_loses_leaf",
        "one leaf is restored as zeros",
        mutations.lose_checkpoint_leaf,
        meshes=lambda num: [{"data": num}],
        restore=True,
        traced=False,
    ),
)
"""Every mutant, in the order of the table."""


def by_name(name: str) -> Mutant:
    """Returns the mutant called `name`."""
    return next(mutant for mutant in MUTANTS if mutant.name == name)
