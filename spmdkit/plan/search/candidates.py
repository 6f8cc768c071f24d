"""`candidates`: every legal way to run a config on a machine, with the estimate of an analytic model for each.

A candidate is a mesh and a value of each setting that the search varies (`VARIED`). It is legal if the program builds.
The estimates (estimate.py) order the candidates, so that only the best are compiled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdkit.config import Config, replace_keys
from spmdkit.errors import ConfigError, UserCodeError
from spmdkit.foundation.formatting import format_bytes
from spmdkit.foundation.jaxprs import equations
from spmdkit.mesh.mesh import AXES, BATCH_AXES, count, describe_mesh, resolve
from spmdkit.ops.remat import LAYER_INPUT, POLICIES
from spmdkit.plan.machine.target import Target
from spmdkit.plan.search.estimate import Estimate, estimate
from spmdkit.program.opening import task_of
from spmdkit.program.program import Program
from spmdkit.program.task import Task

SEARCHED_AXES = ("data", "fsdp", "tensor")
OTHER_AXES = ("context", "expert", "pipeline")
"""Axes that a search varies on request: only some models use them."""
VARIED = (
    "mesh", *OTHER_AXES, "batch", "microbatches", "remat", "zero", "offload", "precision", "attention", "scan",
    "compiler",
)  # fmt: skip
SCAN = "scan_layers"
"""Argument of a task: its layers are one stack that a loop reads, or separate arrays."""
PRESETS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "cpu": (
        {"xla_cpu_use_fusion_emitters": False},
        {"xla_cpu_enable_concurrency_optimized_scheduler": False},
        {"xla_cpu_prefer_vector_width": 512},
        {"xla_multiheap_size_constraint_per_heap": 32 << 20},  # jaxlib 0.10.2 does not write it to the compile cache
    ),
    "gpu": (
        {"xla_gpu_enable_latency_hiding_scheduler": True},
        {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_all_reduce_combine_threshold_bytes": 2**28},
    ),
    "tpu": ({"xla_tpu_scoped_vmem_limit_kib": 65536}, {"xla_tpu_scoped_vmem_limit_kib": 98304}),
}
"""Kind of chip -> sets of options of its compiler."""


@dataclass
class Candidate:
    """One way to run a config on a machine.

    Attributes:
        changes: dotted keys of the config -> values.
        sizes: the mesh, all axes.
        batch_size: the global batch; candidates are compared by seconds per example.
        status: `best`, `fits`, `does not fit`, `refused` (it cannot be built or compiled), `not compiled`.
        reason: the reason for its rank or status, in words.
        estimate_s: of the analytic model; None for a candidate that cannot be built.
        equal: name of a better candidate from which the model does not distinguish it.
        document: the plan, once compiled.
    """

    changes: dict[str, Any]
    sizes: dict[str, int]
    batch_size: int = 1
    status: str = "not compiled"
    reason: str = ""
    estimate_s: float | None = None
    equal: str | None = None
    document: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """`data 2 x fsdp 8, microbatches 4`."""
        others = [f"{key.rsplit('.', 1)[-1]} {_shown(value)}" for key, value in self.changes.items() if key != "mesh"]
        return ", ".join([describe_mesh(self.sizes), *others])

    @property
    def estimate_per_example_s(self) -> float:
        """The estimate divided by the batch; infinite without one."""
        return math.inf if self.estimate_s is None else self.estimate_s / self.batch_size

    @property
    def predicted_per_example_s(self) -> float:
        """The predicted time of the compiled step divided by the batch; infinite without one."""
        return self.document["predicted_step_s"] / self.batch_size if self.document else math.inf

    def as_json(self) -> dict[str, Any]:
        """Returns the row of `plan --search --json`."""
        plan = self.document or {}
        return {
            "name": self.name,
            "changes": self.changes,
            "mesh": self.sizes,
            "batch_size": self.batch_size,
            "status": self.status,
            "reason": self.reason,
            "equal": self.equal,
            "fits": plan.get("fits"),
            "predicted_step_s": plan.get("predicted_step_s"),
            "estimated_step_s": self.estimate_s,
            "peak_bytes": plan.get("memory", {}).get("peak_bytes"),
            "collective_bytes": plan.get("collective_bytes"),
            "mfu": (plan.get("time") or {}).get("mfu"),
        }


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {of_key}" for key, of_key in value.items())
    return ("+".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def candidates(config: Config, task: Task, target: Target, search_over: Sequence[str]) -> list[Candidate]:
    """Returns every candidate, including rejected ones: legal ones first, by the model's estimate.

    Raises:
        ConfigError: `search_over` names a setting that a search cannot vary, or the batch size has a schedule.
    """
    if unknown := [name for name in search_over if name not in VARIED]:
        raise ConfigError(
            f"--search-over names {unknown[0]!r}. A search can vary {', '.join(VARIED)}. Try --search-over "
            "mesh,microbatches."
        )
    if "attention" in search_over and target.chip.kind != "tpu":
        raise ConfigError(
            f"--search-over names attention, the tiles of splash attention, which runs on TPUs, and the target is "
            f"{target.name}. Leave it out, or search for a TPU."
        )
    settings, results = list(_settings(config, search_over, target.chip.kind)), list[Candidate]()
    zeros: Sequence[int | None] = (1, 2, 3) if "zero" in search_over else (None,)
    for sizes, zero in itertools.product(_meshes(config, target, search_over), zeros):
        if zero not in (None, 3) and sizes["fsdp"] == 1:  # all stages are the same
            continue
        changes: dict[str, Any] = {"mesh": {axis: n for axis, n in sizes.items() if n > 1} or {"data": 1}}
        if zero is not None and sizes["fsdp"] > 1:
            changes["layout.zero"] = zero
        results += _of_mesh(config, task, target, sizes, changes, settings)
        if "scan" in search_over and isinstance(stacked := config.task_args.get(SCAN, True), bool):
            other = {"task_args": {**config.task_args, SCAN: not stacked}}
            results += _with_other_task(config, target, sizes, changes | other, settings)
    return sorted(results, key=lambda c: c.estimate_per_example_s)


def variants(config: Config, task: Task, target: Target, settings: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Returns setting -> the candidates that change only it, in the order of their estimates: `changes`, `name`, and
    the reason of those that are not legal (`refused`). `prefetch`, which is not in a compiled step, is `data.prefetch`
    of 1, 2 and 4."""
    found = {setting: list[dict[str, Any]]() for setting in settings}
    searched = [name for name in settings if name in VARIED and (name != "attention" or target.chip.kind == "tpu")]
    setting_of = {"compiler_options": "compiler", "task_args": "scan"}
    for candidate in candidates(config, task, target, searched):
        changes = {name: value for name, value in candidate.changes.items() if name != "mesh"}
        if len(changes) == 1 and (setting := setting_of.get(key := next(iter(changes)), key)) in found:
            refused = None if candidate.estimate_s is not None else candidate.reason
            name = f"{SCAN} {changes[key][SCAN]}" if setting == "scan" else candidate.name.partition(", ")[2]
            found[setting].append({"changes": changes, "name": name, "refused": refused})
    if "prefetch" in settings:
        others = [num for num in (1, 2, 4) if num != config.data.prefetch]
        found["prefetch"] = [
            {"changes": {"data.prefetch": x}, "name": f"prefetch {x}", "refused": None} for x in others
        ]
    return found


def _meshes(config: Config, target: Target, search_over: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yields axis -> size for every product equal to the number of devices. `OTHER_AXES` are varied if the search names
    them or the config sets them."""
    num = target.num_devices
    requested = config.mesh.sizes()
    named = [axis for axis in OTHER_AXES if axis in search_over]
    if "mesh" not in search_over and not named:
        yield resolve(requested, num, target.num_slices if target.compiler == "tpu" else 1)
        return
    varied = (*SEARCHED_AXES, *named)
    free = [a for a in AXES if a != "replica" and (a in varied or requested.get(a, 1) != 1)]
    parts = target.num_slices
    divisors = [n for n in range(1, num + 1) if num % n == 0]
    for replica in [1, parts] if parts > 1 and num % parts == 0 else [1]:
        splits = itertools.product(divisors, repeat=len(free))
        for split in (split for split in splits if math.prod(split) == num // replica):
            yield dict.fromkeys(AXES, 1) | {"replica": replica} | dict(zip(free, split, strict=True))


def _current(config: Config) -> dict[str, Any]:
    """Returns the settings that change no placement, by key."""
    return {
        "batch_size": config.largest_batch,
        "microbatches": config.microbatches,
        "remat": config.remat,
        "offload": config.offload,
        "precision.compute": config.precision.compute,
        "attention": config.attention.model_dump(exclude_defaults=True),
        "compiler_options": dict(config.compiler_options),
    }


def _settings(config: Config, search_over: Sequence[str], kind: str) -> Iterator[dict[str, Any]]:
    """Yields the combinations of values of these settings; `auto` is varied too."""
    if "batch" in search_over and not isinstance(config.batch_size, int):
        raise ConfigError(
            "--search-over names batch, and batch_size has a schedule. A search varies one size. Set batch_size to a "
            "number, or leave out batch."
        )
    offloaded = [] if "optimizer" in config.offload else [[*config.offload, "optimizer"]]
    values: dict[str, tuple[str, list[Any]]] = {
        "batch_size": ("batch", [config.largest_batch * n for n in (1, 2, 4, 8)]),
        "microbatches": ("microbatches", [1, 2, 4, 8, 16]),
        "remat": ("remat", ["none", "dots", *POLICIES, "full"]),
        "offload": ("offload", [config.offload, *offloaded]),
        "precision.compute": ("precision", ["float32", "bfloat16"]),
        "attention": ("attention", _tiles(config)),
        "compiler_options": ("compiler", _presets(config, kind)),
    }
    choices = [
        values[key][1] if values[key][0] in search_over or now == "auto" else [now]
        for key, now in _current(config).items()
    ]
    for combination in itertools.product(*choices):
        yield dict(zip(values, combination, strict=True))


def _tiles(config: Config) -> list[dict[str, Any]]:
    """Returns the section `attention` as it is, and with other tiles of splash attention."""
    section = config.attention.model_dump(exclude_defaults=True)
    tiles = itertools.product((512, 1024, 2048), (False, True))
    others = [{"block_q": n, "block_kv": n, "fused_backward": fused} for n, fused in tiles]
    return [section, *(section | other for other in others)]


def _presets(config: Config, kind: str) -> list[dict[str, Any]]:
    """Returns the compiler options as they are, and with each preset that changes them."""
    now = dict(config.compiler_options)
    presets = [now | dict(preset) for preset in PRESETS.get(kind, ())]
    return [now, *(options for options in presets if options != now)]


def _with_other_task(
    config: Config, target: Target, sizes: dict[str, int], changes: dict[str, Any], settings: Sequence[dict[str, Any]]
) -> list[Candidate]:
    """Returns the candidates of a mesh with other arguments of the task."""
    try:
        task = task_of(replace_keys(config, {"task_args": changes["task_args"]}))
    except (ConfigError, UserCodeError) as error:
        return [Candidate(changes, sizes, config.largest_batch, "refused", str(error).splitlines()[0])]
    return _of_mesh(config, task, target, sizes, changes, settings)


def _of_mesh(
    config: Config,
    task: Task,
    target: Target,
    sizes: dict[str, int],
    changes: dict[str, Any],
    settings: Sequence[dict[str, Any]],
) -> list[Candidate]:
    """Returns the candidates of one mesh and ZeRO stage. One program is built, with the first batch size that
    divides."""
    shards = count(sizes, BATCH_AXES)
    batch = next((s["batch_size"] for s in settings if s["batch_size"] % shards == 0), None)
    if batch is None:
        reason = f"batch_size {config.largest_batch} does not divide over {shards} parts of the batch"
        return [Candidate(changes, sizes, config.largest_batch, "refused", reason)]
    built = changes | {"microbatches": 1, "remat": "none"}
    if batch != config.largest_batch:
        built["batch_size"] = batch
    try:
        program = Program(replace_keys(config, built), task, target.devices)
        costs = estimate(program, target)
    except (ConfigError, UserCodeError) as error:
        return [Candidate(changes, sizes, config.largest_batch, "refused", str(error).splitlines()[0])]
    unmarked = _unmarked_policies(program.traced.jaxpr)
    fixed = config.microbatches  # not searched: refused if it does not divide
    tried = [
        each
        for each in settings
        if each["microbatches"] == fixed or each["batch_size"] % (shards * each["microbatches"]) == 0
        if each["remat"] == config.remat or each["remat"] not in unmarked
    ]
    return [_candidate(config, target, sizes, changes, each, costs) for each in tried]


def _unmarked_policies(jaxpr: Any) -> list[str]:
    """Returns the remat policies that save values by names that a step does not mark."""
    marks = {eqn.params["name"] for eqn in equations(jaxpr) if eqn.primitive.name == "name"} | {LAYER_INPUT}
    return [name for name, names in POLICIES.items() if not marks & {*names.save, *names.offload}]


def _candidate(
    config: Config,
    target: Target,
    sizes: dict[str, int],
    changes: dict[str, Any],
    settings: dict[str, Any],
    costs: Estimate,
) -> Candidate:
    rows, m, shards = settings["batch_size"], settings["microbatches"], count(sizes, BATCH_AXES)
    changes = changes | {key: settings[key] for key, now in _current(config).items() if settings[key] != now}
    offload = "optimizer" in settings["offload"] and "optimizer" not in config.offload
    state, limit = costs.state_bytes - costs.optimizer_bytes * offload, target.memory_limit_bytes
    if rows % (shards * m):
        reason = f"batch_size {rows} does not divide over {shards} parts and {m} microbatches"
        return Candidate(changes, sizes, rows, "refused", reason)
    if state > limit:
        reason = f"parameters and optimizer state alone need {format_bytes(state)} of {format_bytes(limit)}"
        return Candidate(changes, sizes, rows, "does not fit", reason)
    remat, compute = settings["remat"], settings["precision.compute"]
    return Candidate(changes, sizes, rows, estimate_s=costs.seconds(target.chip, rows, m, remat, compute, offload))
