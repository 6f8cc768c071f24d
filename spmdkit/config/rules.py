"""Rules over several fields: invalid combinations, and settings that another setting makes ineffective."""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from spmdkit.config import optimizer, parameter_server, run_dir
from spmdkit.config.problems import KeyPath, Problem, render, show
from spmdkit.config.settings import Settings
from spmdkit.config.task import reference_problem
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins, redact
from spmdkit.foundation.constants import AXES, LOGICAL_AXES
from spmdkit.foundation.formatting import nearest, shown

PLUGIN_KEYS = {"reducer": ("reducers", "sum"), "sync": ("syncs", "every_step")}
"""Key -> (group of plug-ins, default)."""

MAX_DEPTH = 32


def check(config: Settings, folder: Path) -> list[Problem]:
    """Returns the problems between individually valid fields of a config. `folder` is the base of relative paths."""
    rules = (
        _references,
        _task,
        _init_from,
        _length,
        _batch,
        _buckets,
        _mesh,
        _layout,
        _choices,
        _remat,
        _learning,
        _groups,
        _deterministic,
        _without_effect,
        _combinations,
    )
    return [*run_dir.problems(config, folder), *(problem for rule in rules for problem in rule(config))]


def _references(config: Settings) -> Iterator[Problem]:
    """Rejects `${` in values of Python; those of files are replaced when the file is read."""
    yield from _unresolved(config.model_dump(exclude_defaults=True), ())


def _unresolved(value: Any, path: KeyPath) -> Iterator[Problem]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in inner if len(path) < MAX_DEPTH else ():
        yield from _unresolved(item, (*path, key if isinstance(key, int) and not isinstance(value, dict) else str(key)))
    if isinstance(value, str) and "${" in value:
        yield Problem(path, f"{show(value)}: ${{env:NAME}} is replaced in files. In Python write os.environ['NAME'].")


def _task(config: Settings) -> Iterator[Problem]:
    if problem := reference_problem(config.task):
        yield Problem(("task",), problem)
    for key in config.task_args:
        if not key.isidentifier() or keyword.iskeyword(key):
            yield Problem(("task_args", key), "is not a valid name of a keyword argument in Python. Rename it.")
    yield from plain_values(config.task_args, ("task_args",))
    yield from _hidden(config.task_args, ("task_args",))


def _init_from(config: Settings) -> Iterator[Problem]:
    if (given := config.init_from) is None:
        return
    where: KeyPath = ("init_from",)
    if (given.file is None) == (given.path is None):
        found = "neither" if given.file is None else "both"
        yield Problem(where, f"has {found} of file and path. It has one source. Try init_from: runs/first@best.")
    elif given.file is not None and not given.file.endswith((".safetensors", ".safetensors.index.json")):
        text = f"should be a .safetensors file or a .safetensors.index.json, found {show(given.file)}"
        yield Problem((*where, "file"), f"{text}. Convert the file, or name a run or a folder of orbax by path.")
    if isinstance(given.names, list):
        return
    yield from plain_values(given.names, (*where, "names"))
    is_reference = plugins.is_reference(given.names) or not isinstance(given.names, str)  # else the name of a map
    if is_reference and (problem := reference_problem(plugins.split(given.names)[0], "weights")):
        yield Problem((*where, "names"), problem)


def _length(config: Settings) -> Iterator[Problem]:
    if config.epochs is None and config.steps is None:
        yield Problem(("steps",), "is null, and so is epochs. A run has one of them. Try steps: 100, or epochs: 3.")
    elif config.epochs is not None and config.steps is not None:
        text = (
            f"is {config.epochs}, and steps is {config.steps}. A run has one length. Remove one of them, or set it to"
        )
        yield Problem(("epochs",), f"{text} null.")
    elif config.epochs is not None and parameter_server.is_chosen(config):
        text = "with sync: parameter_server a step is an update, and workers read batches at their own pace. Set steps."
        yield Problem(("epochs",), f"is {config.epochs}; {text}")


def _hidden(value: Any, path: KeyPath) -> Iterator[Problem]:
    """Yields the problems of keys with `***` in place of a secret."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _hidden(inner, (*path, key))
    elif isinstance(value, str) and value == redact.HIDDEN:
        why = "which spmdkit writes in place of a secret. No file of a run contains the value"
        yield Problem(path, f"is '***', {why}. Set it.")


def _buckets(config: Settings) -> Iterator[Problem]:
    keys = ("bucket_boundaries", "bucket_by")
    missing = [key for key in keys if getattr(config.data, key) is None]
    if len(missing) == 1:
        yield Problem(("data", missing[0]), f"is null, and {' and '.join(keys)} go together. Set both, or none.")
    elif not missing and config.data.max_bad_examples:
        text = "has no effect with bucket_boundaries: the next readable example has another length. Remove it."
        yield Problem(("data", "max_bad_examples"), text)
    elif not missing and parameter_server.is_chosen(config):
        text = "needs the step of all devices, and sync is parameter_server. Remove it and bucket_by."
        yield Problem(("data", "bucket_boundaries"), text)


def _batch(config: Settings) -> Iterator[Problem]:
    parts = config.microbatches if isinstance(config.microbatches, int) else 1
    if len(config.batch_sizes) > 1 and parameter_server.is_chosen(config):
        yield Problem(("batch_size",), "is a schedule, and with sync: parameter_server it is one number. Write one.")
    if size := next((size for _, size in config.batch_sizes if size % parts), None):
        divisors = [d for d in range(1, min(size, 100_000) + 1) if size % d == 0]
        near = [str(d) for d in (max(d for d in divisors if d < parts), min([d for d in divisors if d > parts] or [0]))]
        yield Problem(
            ("microbatches",),
            f"splits batch_size {size} into {parts} parts, found a remainder of {size % parts}. microbatches must "
            f"divide batch_size. Try microbatches: {' or '.join(d for d in near if d != '0')}, or batch_size: "
            f"{_multiples(size, parts)}.",
        )
    elif all(config.mesh.sizes().get(axis, 1) > 0 for axis in LOGICAL_AXES["batch"]):
        yield from _batch_on_mesh(config, config.mesh.sizes())


def check_batch(config: Settings, sizes: Mapping[str, int]) -> None:
    """Raises ConfigError unless `batch_size` divides over the mesh and the microbatches. `sizes` has no -1."""
    if problems := list(_batch_on_mesh(config, sizes)):
        raise ConfigError(render(problems, config._origin))


def batch_unit(config: Settings, sizes: Mapping[str, int]) -> int:
    """Returns the number that divides every batch size on a mesh. `sizes` has no -1."""
    shards = math.prod(sizes.get(axis, 1) for axis in LOGICAL_AXES["batch"])
    microbatches = config.microbatches if isinstance(config.microbatches, int) else 1
    return shards * microbatches * _staged(config, sizes)


def _staged(config: Settings, sizes: Mapping[str, int]) -> int:
    return (config.pipeline.microbatches or 1) if sizes.get("pipeline", 1) > 1 else 1


def _batch_on_mesh(config: Settings, sizes: Mapping[str, int]) -> Iterator[Problem]:
    axes = {axis: sizes[axis] for axis in LOGICAL_AXES["batch"] if sizes.get(axis, 1) > 1}
    shards, unit, staged = math.prod(axes.values()), batch_unit(config, sizes), _staged(config, sizes)
    if size := next((size for _, size in config.batch_sizes if size % unit), None):
        cut = " x ".join(f"{shown(axis)}({size})" for axis, size in axes.items())
        also = f" and microbatches into {config.microbatches}" if unit > shards * staged else ""
        also += f" and pipeline.microbatches into {staged}" if staged > 1 else ""
        cut = f"{cut} = {shards}" if cut else "1"
        yield Problem(
            ("batch_size",),
            f"is {size}; the mesh splits a batch into {cut}{also}, found a remainder of {size % unit}. batch_size must "
            f"be a multiple of {unit}. Try batch_size: {_multiples(size, unit)}.",
        )


def _multiples(value: int, unit: int) -> str:
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else str(above)


def _mesh(config: Settings) -> Iterator[Problem]:
    filled = [axis for axis, size in config.mesh.sizes().items() if size == -1]
    for axis in filled[1:]:
        yield Problem(
            ("mesh", axis),
            f"is -1, and so is mesh.{filled[0]}. At most one axis can be -1. Give one a number.",
        )
    for name, axis in config.roles.items():
        if name in AXES and name != axis:
            yield Problem(("roles", name), f"has the role {axis}, but is the name of another axis. Rename it.")
    for axis in dict.fromkeys(config.roles.values()):
        if len(names := [name for name, role in config.roles.items() if role == axis]) > 1:
            yield Problem(
                ("roles",), f"{' and '.join(names)} both have the role {axis}. A role has one name. Remove one of them."
            )


def _layout(config: Settings) -> Iterator[Problem]:
    known = list(dict.fromkeys([*LOGICAL_AXES, *config.layout.axes, *AXES, *config.roles]))
    seen: dict[str, int] = {}
    for i, (pattern, dims) in enumerate(config.layout.rules):
        if pattern in seen:
            yield Problem(
                ("layout", "rules", i),
                f"has the pattern {show(pattern)} of rule [{seen[pattern]}]. One rule claims a leaf. Remove one.",
            )
        seen.setdefault(pattern, i)
        for j, name in [(j, n) for j, dim in enumerate(dims) for n in ((dim,) if isinstance(dim, str) else dim or ())]:
            if name not in known:
                yield Problem(
                    ("layout", "rules", i, 1, j),
                    f"unknown axis {name!r}.{nearest(name, known)} Known are {', '.join(known)}; layout.axes adds.",
                )


def _choices(config: Settings) -> Iterator[Problem]:
    for key, (group, default) in PLUGIN_KEYS.items():
        value = getattr(config, key)
        if value == default:
            continue  # the other plug-ins import JAX
        if isinstance(value, dict):
            yield from plain_values(value, (key,))
        if key == "sync" and parameter_server.is_chosen(config):
            yield from parameter_server.problems(config)
            continue
        name, options = plugins.split(value)
        invalid = reference_problem(name, key) if plugins.is_reference(value) else ""
        if invalid := invalid or plugins.problem(group, value) or "":
            yield Problem((key,), invalid)
        elif key == "reducer":
            yield from _warmup(config, name, options)
        elif not plugins.is_reference(value) and (outer := plugins.make(group, value).outer_optimizer) is not None:
            for problem in optimizer.optimizer_problems(outer, False):
                yield Problem((key, name, *problem.path), problem.text)
    for key, kind in (("preemption", "preemption_sources"), ("hooks", "hooks")):
        for i, choice in enumerate(getattr(config, key)):
            if (kind == "preemption_sources" or not plugins.is_reference(choice)) and (
                why_not := plugins.problem(kind, choice)
            ):
                yield Problem((key, i), why_not)


def _warmup(config: Settings, name: str, options: Mapping[str, Any]) -> Iterator[Problem]:
    steps = options.get("warmup", 0)
    text = ""
    if steps and name == "sum":
        text = f"is sum with warmup: {steps}, steps in which sum is used instead. Write reducer: sum."
    elif config.steps is not None and steps >= config.steps:
        text = (
            f"has warmup: {steps}, and steps is {config.steps}: {name} would never add. A warm-up ends before the run "
            f"does. Try warmup: {config.steps // 10}, or reducer: sum."
        )
    if text:
        yield Problem(("reducer",), text)


def _remat(config: Settings) -> Iterator[Problem]:
    if isinstance(config.remat, str):
        return
    save, offload = config.remat.save, config.remat.offload
    if not save and not offload:
        yield Problem(
            ("remat",), "names nothing to save, which is the same as full. Write remat: full, or save: [attention]."
        )
    for name in save:
        if name in offload:
            yield Problem(
                ("remat", "offload", offload.index(name)),
                f"is {name!r}, and remat.save has it too. A value is kept on the device or on the host. Remove one.",
            )
    for key, names in (("save", save), ("offload", offload)):
        for i, name in enumerate(names):
            if name in names[:i]:
                yield Problem(("remat", key, i), f"is {name!r} a second time. Remove it.")


def _learning(config: Settings) -> Iterator[Problem]:
    for key in ("optimizer", "learning_rate"):
        value = getattr(config, key)
        if unplain := list(plain_values(value, (key,))):
            yield from unplain
            return
    has_rate = config.optimizer is not None and "learning_rate" in config.optimizer
    if has_rate and config.learning_rate is not None:
        yield Problem(
            ("optimizer", "learning_rate"),
            "is given, and the key learning_rate too. Only one can have an effect. Remove one of them.",
        )
    if isinstance(config.learning_rate, dict):
        yield from optimizer.schedule_problems(config.learning_rate, ("learning_rate",))
    if config.optimizer is not None:
        yield from optimizer.optimizer_problems(config.optimizer, config.learning_rate is not None)


def _groups(config: Settings) -> Iterator[Problem]:
    name = None if config.optimizer is None else str(config.optimizer.get("name"))
    for i, group in enumerate(config.groups):
        path: KeyPath = ("groups", i)
        if not group.changes and group.frozen is None:
            yield Problem(path, "sets nothing, found only match. Add weight_decay, learning_rate_scale or frozen.")
        elif group.changes and group.frozen:
            yield Problem(
                path, f"is frozen and sets {', '.join(group.changes)}, without an effect. Remove one of them."
            )
        if group.weight_decay is not None and name is None:
            text = "needs an optimizer in the config, found optimizer: null. Try optimizer: {name: adamw, ...}."
            yield Problem((*path, "weight_decay"), text)
        if group.changes and name == "lbfgs":
            yield Problem(path, f"sets {', '.join(group.changes)}; lbfgs searches along one line. Remove the group.")
        has_rate = config.learning_rate is not None or "learning_rate" in (config.optimizer or {})
        if group.learning_rate_scale is not None and config.optimizer is not None and not has_rate:
            yield Problem((*path, "learning_rate_scale"), "needs a learning rate, found none. Set learning_rate.")


def _deterministic(config: Settings) -> Iterator[Problem]:
    if not config.deterministic:
        return
    if config.attention.implementation == "cudnn":
        why = "with a gradient that sums in another order each time, and deterministic is true"
        repair = "Try implementation: xla, or deterministic: false."
        yield Problem(("attention", "implementation"), f"is cudnn, {why}. {repair}")
    for name in ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops"):
        if (value := config.compiler_options.get(name, True)) is not True:
            why = "and deterministic is true, which sets it to true on GPUs"
            yield Problem(("compiler_options", name), f"is {show(value)}, {why}. Remove one of them.")


def _without_effect(config: Settings) -> Iterator[Problem]:
    """Yields settings that differ from the default but have no effect under another setting."""
    mesh, pipeline, layout, attention = config.mesh, config.pipeline, config.layout, config.attention
    axis = "the mesh has no {0} axis", "name the axis, for example mesh: {{{0}: {1}}}"
    no_axis: Callable[..., tuple[str, ...]] = lambda *names: tuple(text.format(*names) for text in axis)
    exact = config.precision.compute == config.precision.params == "float32"
    for is_idle, section, keys, (why, repair) in (
        (mesh.pipeline is None, "pipeline", ("schedule", "microbatches", "chunks"), no_axis("pipeline", 2)),
        (
            mesh.pipeline is not None and pipeline.schedule != "interleaved",
            "pipeline",
            ("chunks",),
            (f"pipeline.schedule is {pipeline.schedule}, with one chunk per stage", "set schedule: interleaved"),
        ),
        (mesh.fsdp is None, "layout", ("zero", "fsdp", "min_shard_bytes"), no_axis("fsdp", -1)),
        (
            mesh.fsdp is not None and layout.fsdp == "off",
            "layout",
            ("min_shard_bytes",),
            ("layout.fsdp is off", "set fsdp: auto"),
        ),
        (mesh.context in (None, 1), "attention", ("context", "order"), no_axis("context", 2)),
        (
            mesh.context not in (None, 1) and attention.context == "all_to_all",
            "attention",
            ("order",),
            ("attention.context is all_to_all, which always keeps neighbors together", "set context: ring"),
        ),
        (
            attention.implementation in ("xla", "cudnn"),
            "attention",
            ("block_q", "block_kv", "block_kv_compute", "fused_backward"),
            (
                f"attention.implementation is {attention.implementation}, without such tiles",
                "set implementation: splash",
            ),
        ),
        (
            not config.elastic.in_process,
            "elastic",
            ("snapshot_every", "standby", "precompile"),
            ("elastic.in_process is false", "set in_process: true"),
        ),
        (
            config.precision.params != "bfloat16",
            "precision",
            ("rounding",),
            (f"params is {config.precision.params}, which loses no update", "set params: bfloat16"),
        ),
        (exact, "precision", ("inputs",), ("compute and params are float32", "set compute: bfloat16")),
    ):
        default = type(getattr(config, section))()
        for key in keys if is_idle else ():
            if (value := getattr(getattr(config, section), key)) != getattr(default, key):
                text = f"is {value}, and {why}, so it has no effect. Remove it, or {repair}."
                yield Problem((section, key), text)


def _combinations(config: Settings) -> Iterator[Problem]:
    if config.mesh.pipeline is not None and config.pipeline.schedule == "interleaved" and config.pipeline.chunks == 1:
        text = "is 1: interleaved with one chunk per stage is 1f1b. Try chunks: 2, or schedule: 1f1b."
        yield Problem(("pipeline", "chunks"), text)
    if config.on_spike is not None and plugins.split(config.sync)[0] not in ("every_step", "stale"):
        text = "needs the loss of all replicas in every step, and with this sync groups of replicas train separately"
        yield Problem(("on_spike",), f"{text}, so it has no effect. Remove it, or use sync: every_step.")
    sync = plugins.split(config.sync)[0]
    if config.precision.rounding == "stochastic" and sync not in ("every_step", "stale"):
        text = f"is stochastic, and sync: {sync} also changes parameters outside of the step, rounded to nearest"
        repair = "These averages and sums would lose the small updates again. Use sync: every_step, or params: float32."
        yield Problem(("precision", "rounding"), f"{text}. {repair}")
    if config.precision.matmul == "float8" and (
        config.mesh.pipeline is not None or sync not in ("every_step", "stale")
    ):
        what = f"sync: {sync}" if config.mesh.pipeline is None else "mesh.pipeline"
        text = f"is float8, and {what} adds or averages the magnitudes that scale these products, which are maxima"
        yield Problem(("precision", "matmul"), f"{text}. Remove one of the two.")
    if config.eval.params == "ema" and config.ema is None:
        text = "is ema, and there is no average of parameters. Try ema: 0.999, or params: params."
        yield Problem(("eval", "params"), text)
    if config.checkpoint and config.checkpoint.best and config.eval.every_steps is None:
        text = "needs evaluations while training, found eval.every_steps: null. Try eval: {every_steps: 100}."
        yield Problem(("checkpoint", "best"), text)
    first, last = config.profile.steps if config.profile else (0, 0)
    if config.steps is not None and last > config.steps:
        yield Problem(
            ("profile", "steps"),
            f"covers steps {first} to {last}, found steps: {config.steps}. The trace lies within the run. Try "
            f"profile: {{steps: [{max(1, config.steps - last + first)}, {config.steps}]}}.",
        )
    if config.elastic.in_process and parameter_server.is_chosen(config):
        why = "with sync: parameter_server there is no step of all processes to go back to"
        repair = "A worker that dies is started again there anyway. Remove it."
        yield Problem(("elastic", "in_process"), f"is true, and {why}. {repair}")


def plain_values(value: Any, path: KeyPath, depth: int = 0) -> Iterator[Problem]:
    """Yields a problem for everything inside `value` that YAML cannot represent, and for NaN and infinity."""
    if depth > MAX_DEPTH:
        yield Problem(path, f"is nested more than {MAX_DEPTH} deep. Write it flatter.")
    elif isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(key, str | int) and not isinstance(key, bool):
                yield from plain_values(inner, (*path, str(key)), depth + 1)
            else:
                yield Problem(path, f"needs keys that are text or whole numbers, found {show(key)}. Put it in quotes.")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from plain_values(inner, (*path, i), depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(path, f"needs a finite number, found {value}. NaN and infinity are refused. Write a number.")
    elif not isinstance(value, str | int | float | None):
        yield Problem(
            path,
            f"needs a plain value (text, number, true, false, null, list, mapping), found {show(value)}. "
            "A config can be written to a file. Make the object in the task.",
        )
