"""`candidates`: every legal way to shard a config over a machine, with the estimate of an analytic model for each.

A candidate is a mesh, and optionally a number of microbatches, a remat policy and a ZeRO stage. It is legal if the
program builds. The estimates order the candidates, so that only the best are compiled; they are not predictions:

    arithmetic    FLOPs of the step / devices, a quarter to a third more with remat
    memory        three times the state: the update reads and writes it, and the passes move parameters and gradients;
                  a state that alone exceeds a device rules the candidate out
    replica, data one reduction of the gradient                              (plan/lower_bound.py)
    fsdp          gathers of the parameters in each microbatch, and one scatter
    tensor        activations reduced once for each pair of sharded matrices, forward and backward
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spmdkit.config import Config, replace_keys
from spmdkit.errors import ConfigError, UserCodeError
from spmdkit.foundation.formatting import format_bytes
from spmdkit.mesh.mesh import AXES, BATCH_AXES, REPLICA_AXES, count, describe_mesh, dim_axes, resolve
from spmdkit.plan.document import tokens_of_batch
from spmdkit.plan.flops import count as count_flops
from spmdkit.plan.lower_bound import lower_bound_bytes
from spmdkit.plan.machine.links import link_path
from spmdkit.plan.machine.target import Target
from spmdkit.program.auto import microbatch_counts
from spmdkit.program.program import Program
from spmdkit.program.task import Task

SEARCHED_AXES = ("data", "fsdp", "tensor")
VARIED = ("mesh", "microbatches", "remat", "zero")
_REMAT_COST = {"none": 1.0, "dots": 1.05, "dots_no_batch": 1.1, "full": 1.3}


@dataclass
class Candidate:
    """One way to shard a config over a machine.

    Attributes:
        changes: dotted keys of the config -> values.
        sizes: the mesh, all axes.
        status: `best`, `fits`, `does not fit`, `refused` (it cannot be built or compiled), `not compiled`.
        reason: the reason for its rank or status, in words.
        estimate_s: of the analytic model; None for a candidate that cannot be built.
        document: the plan, once compiled.
    """

    changes: dict[str, Any]
    sizes: dict[str, int]
    status: str = "not compiled"
    reason: str = ""
    estimate_s: float | None = None
    document: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """`data 2 x fsdp 8, microbatches 4`."""
        others = [f"{key.rsplit('.', 1)[-1]} {value}" for key, value in self.changes.items() if key != "mesh"]
        return ", ".join([describe_mesh(self.sizes), *others])

    def as_json(self) -> dict[str, Any]:
        """Returns the row of `plan --search --json`."""
        plan = self.document or {}
        return {
            "name": self.name,
            "changes": self.changes,
            "mesh": self.sizes,
            "status": self.status,
            "reason": self.reason,
            "fits": plan.get("fits"),
            "predicted_step_s": plan.get("predicted_step_s"),
            "estimated_step_s": self.estimate_s,
            "peak_bytes": plan.get("memory", {}).get("peak_bytes"),
            "collective_bytes": plan.get("collective_bytes"),
            "mfu": (plan.get("time") or {}).get("mfu"),
        }


def candidates(config: Config, task: Task, target: Target, search_over: Sequence[str]) -> list[Candidate]:
    """Returns every candidate, including rejected ones: legal ones first, by the model's estimate.

    Raises:
        ConfigError: `search_over` names a setting that a search cannot vary.
    """
    if unknown := [name for name in search_over if name not in VARIED]:
        raise ConfigError(
            f"--search-over names {unknown[0]!r}. A search can vary {', '.join(VARIED)}. Try --search-over "
            "mesh,microbatches."
        )
    results: list[Candidate] = []
    zeros: Sequence[int | None] = (1, 2, 3) if "zero" in search_over else (None,)
    for sizes, zero in itertools.product(_meshes(config, target, "mesh" in search_over), zeros):
        if zero not in (None, 3) and sizes["fsdp"] == 1:
            continue
        changes: dict[str, Any] = {"mesh": {axis: n for axis, n in sizes.items() if n > 1} or {"data": 1}}
        if zero is not None and sizes["fsdp"] > 1:
            changes["layout.zero"] = zero
        results += _of_mesh(config, task, target, sizes, changes, search_over)
    return sorted(results, key=lambda c: math.inf if c.estimate_s is None else c.estimate_s)


def _meshes(config: Config, target: Target, every: bool) -> Iterator[dict[str, int]]:
    """Yields axis -> size for every product equal to the number of devices. Axes that only some models use are varied
    only if the config sets them."""
    num = target.num_devices
    requested = config.mesh.sizes()
    if not every:
        yield resolve(requested, num, target.num_slices if target.compiler == "tpu" else 1)
        return
    free = [a for a in AXES if a != "replica" and (a in SEARCHED_AXES or requested.get(a, 1) != 1)]
    parts = target.num_slices
    divisors = [n for n in range(1, num + 1) if num % n == 0]
    for replica in [1, parts] if parts > 1 and num % parts == 0 else [1]:
        splits = itertools.product(divisors, repeat=len(free))
        for split in (split for split in splits if math.prod(split) == num // replica):
            yield dict.fromkeys(AXES, 1) | {"replica": replica} | dict(zip(free, split, strict=True))


def _of_mesh(
    config: Config,
    task: Task,
    target: Target,
    sizes: dict[str, int],
    changes: dict[str, Any],
    search_over: Sequence[str],
) -> list[Candidate]:
    """Returns the candidates of one mesh and ZeRO stage, built once: microbatches and remat change no placement."""
    shards = count(sizes, BATCH_AXES)
    if config.largest_batch % shards:
        reason = f"batch_size {config.largest_batch} does not divide over {shards} parts of the batch"
        return [Candidate(changes, sizes, "refused", reason)]
    plain = {**changes, "microbatches": 1, "remat": "none" if config.remat == "auto" else config.remat}
    try:
        program = Program(replace_keys(config, plain), task, target.devices)
    except (ConfigError, UserCodeError) as error:
        return [Candidate(changes, sizes, "refused", str(error).splitlines()[0])]
    state = program.input_bytes.state_bytes
    if state > target.memory_limit_bytes:
        reason = (
            f"parameters and optimizer state alone need {format_bytes(state)} of "
            f"{format_bytes(target.memory_limit_bytes)}"
        )
        return [Candidate(changes, sizes, "does not fit", reason)]
    counts: Sequence[int] = [config.microbatches] if isinstance(config.microbatches, int) else [1]
    if "microbatches" in search_over or config.microbatches == "auto":
        counts = [m for m in microbatch_counts(config, shards) if m <= 16]
    remats: Sequence[Any] = [config.remat]
    if "remat" in search_over or config.remat == "auto":
        remats = ["none", "dots", "full"]
    work = _work(program, target)
    results = []
    for m, remat in itertools.product(counts, remats):
        if config.largest_batch // shards % m:
            reason = f"batch_size {config.largest_batch} does not divide over {shards} parts and {m} microbatches"
            results.append(Candidate(changes | {"microbatches": m}, sizes, "refused", reason))
            continue
        all_changes = changes | ({"microbatches": m} if m != config.microbatches else {})
        all_changes |= {"remat": remat} if remat != config.remat else {}
        cost = _REMAT_COST.get(remat if isinstance(remat, str) else "dots", 1.0)
        estimate = work["arithmetic"] * cost + work["memory"] + work["fixed wire"] + work["gathers"] * m
        results.append(Candidate(all_changes, sizes, estimate_s=estimate))
    return results


def _work(program: Program, target: Target) -> Mapping[str, float]:
    """Returns part of the model -> seconds."""
    chip, arithmetic = target.chip, count_flops(program.traced.jaxpr)
    by_dtype = arithmetic.by_dtype or {"float32": arithmetic.elementwise}
    bytes_sent = lower_bound_bytes(program)
    state = program.input_bytes.state_bytes + program.input_bytes.host_bytes
    over_replicas = _over(target, program, REPLICA_AXES, bytes_sent.get("replica x data", 0))
    return {
        "arithmetic": chip.products_s(by_dtype) / program.mesh.devices.size,
        "memory": 3 * state / (chip.memory_bytes_per_s * chip.efficiency.memory),
        "fixed wire": over_replicas + _over(target, program, ("tensor",), _tensor_bytes(program)),
        "gathers": _over(target, program, ("fsdp",), bytes_sent.get("fsdp", 0)),
    }


def _over(target: Target, program: Program, axes: Sequence[str], num_bytes: float) -> float:
    """Returns the seconds in which a device sends `num_bytes` to the devices that differ from it along the axes."""
    places = np.arange(program.mesh.size).reshape(program.mesh.devices.shape)
    group = places[tuple(slice(None) if axis in axes else 0 for axis in AXES)].ravel()
    if not num_bytes or group.size < 2:
        return 0.0
    path = link_path(target, list(program.mesh.devices.flat), group.tolist())
    return path.seconds(num_bytes, "all_reduce", group.size)


def _tensor_bytes(program: Program) -> float:
    """Returns the activation bytes that a device reduces due to tensor sharding: for a pair of matrices, once forward
    and once backward."""
    t = program.sizes["tensor"]
    if t == 1:
        return 0.0
    rows = (tokens_of_batch(program) or program.config.largest_batch) / program.batch_shards
    width = 2 if program.config.precision.compute == "bfloat16" else 4
    total = 0.0
    for leaf in program.layout:
        sharded = [i for i, dim in enumerate(leaf.spec) if "tensor" in dim_axes(dim)]
        if not leaf.path.startswith("params") or not sharded or len(leaf.shape) < 2:
            continue
        layers = leaf.shape[0] if len(leaf.shape) > 2 and leaf.spec[0] is None else 1
        unsharded = [n for i, n in enumerate(leaf.shape) if i not in sharded and not (i == 0 and layers > 1)]
        total += layers * rows * max(unsharded, default=1) * width
    return total * 2 * (t - 1) / t
