"""Rules over several fields: combinations that cannot work, and settings that have no effect under another one."""

from __future__ import annotations

import keyword
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spmdkit.config import optimizer, parameter_server, run_dir
from spmdkit.config.problems import KeyPath, Problem, render, show
from spmdkit.config.settings import Settings
from spmdkit.config.task import reference_problem
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins, redact
from spmdkit.foundation.constants import AXES, LOGICAL_AXES
from spmdkit.foundation.formatting import nearest

PLUGIN_KEYS = {"reducer": ("reducers", "sum"), "sync": ("syncs", "every_step")}
"""Key -> (group of plug-ins, default)."""

MAX_DEPTH = 32


def check(config: Settings, folder: Path) -> list[Problem]:
    """Returns every problem between the valid fields of a config; `folder` is the base of relative paths."""
    return [
        *_task(config),
        *run_dir.problems(config, folder),
        *_batch(config),
        *_mesh(config),
        *_layout(config),
        *_pipeline(config),
        *_choices(config),
        *_remat(config),
        *_learning(config),
        *_precision(config),
        *_deterministic(config),
        *_without_effect(config),
        *_elastic(config),
    ]


def _task(config: Settings) -> Iterator[Problem]:
    if problem := reference_problem(config.task):
        yield Problem(("task",), problem)
    for key in config.task_args:
        if not key.isidentifier() or keyword.iskeyword(key):
            yield Problem(("task_args", key), "is no name of a keyword argument of Python. Rename it.")
    yield from plain_values(config.task_args, ("task_args",))
    for path in _hidden(config.task_args, ("task_args",)):
        yield Problem(
            path,
            "is '***', which spmdkit writes in place of a secret. No file of a run contains the value. Set it.",
        )


def _hidden(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yields the keys with `***` in place of a secret."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _hidden(inner, (*path, key))
    elif isinstance(value, str) and value == redact.HIDDEN:
        yield path


def _batch(config: Settings) -> Iterator[Problem]:
    if isinstance(config.microbatches, int) and config.batch_size % config.microbatches:
        divisors = [d for d in range(1, min(config.batch_size, 100_000) + 1) if config.batch_size % d == 0]
        below = max((d for d in divisors if d < config.microbatches), default=1)
        above = min((d for d in divisors if d > config.microbatches), default=None)
        counts = f"{below} or {above}" if above else str(below)
        yield Problem(
            ("microbatches",),
            f"cuts batch_size {config.batch_size} into {config.microbatches} parts, found a rest of "
            f"{config.batch_size % config.microbatches}. microbatches divides batch_size. "
            f"Try microbatches: {counts}, or batch_size: {_multiples(config.batch_size, config.microbatches)}.",
        )
        return
    if all(config.mesh.sizes().get(axis, 1) > 0 for axis in LOGICAL_AXES["batch"]):
        yield from _batch_on_mesh(config, config.mesh.sizes())


def check_batch(config: Settings, sizes: Mapping[str, int]) -> None:
    """Raises ConfigError unless `batch_size` divides over the mesh and the microbatches; `sizes` has no -1 left."""
    if found := list(_batch_on_mesh(config, sizes)):
        raise ConfigError(render(found, config._origin))


def _batch_on_mesh(config: Settings, sizes: Mapping[str, int]) -> Iterator[Problem]:
    axes = {axis: sizes[axis] for axis in LOGICAL_AXES["batch"] if sizes.get(axis, 1) > 1}
    shards = math.prod(axes.values())
    microbatches = config.microbatches if isinstance(config.microbatches, int) else 1
    staged = (config.pipeline.microbatches or 1) if sizes.get("pipeline", 1) > 1 else 1
    unit = shards * microbatches * staged
    if config.batch_size % unit:
        cut = " x ".join(f"{axis}({size})" for axis, size in axes.items())
        also = f" and microbatches into {microbatches}" if microbatches > 1 else ""
        also += f" and pipeline.microbatches into {staged}" if staged > 1 else ""
        yield Problem(
            ("batch_size",),
            (
                f"is {config.batch_size}; the mesh cuts a batch into {f'{cut} = {shards}' if cut else 1}{also}, found "
                f"a rest of {config.batch_size % unit}. batch_size is a multiple of {unit}. Try batch_size: "
                f"{_multiples(config.batch_size, unit)}."
            ),
        )


def _multiples(value: int, unit: int) -> str:
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else str(above)


def _mesh(config: Settings) -> Iterator[Problem]:
    filled = [axis for axis, size in config.mesh.sizes().items() if size == -1]
    for axis in filled[1:]:
        yield Problem(
            ("mesh", axis),
            f"is -1, and so is mesh.{filled[0]}. Only one axis can take what the others leave. Give one a number.",
        )


def _layout(config: Settings) -> Iterator[Problem]:
    known = list(dict.fromkeys([*LOGICAL_AXES, *config.layout.axes, *AXES]))
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


def _pipeline(config: Settings) -> Iterator[Problem]:
    pipeline, default = config.pipeline, type(config.pipeline)()
    if config.mesh.pipeline is None:
        for key in ("schedule", "microbatches", "chunks"):
            if (value := getattr(pipeline, key)) != getattr(default, key):
                yield Problem(
                    ("pipeline", key),
                    (
                        f"is {value}, and the mesh has no pipeline axis, so it has no effect. Remove it, or name the "
                        "axis, for example mesh: {pipeline: 2}."
                    ),
                )
    elif pipeline.schedule != "interleaved" and pipeline.chunks is not None:
        yield Problem(
            ("pipeline", "chunks"),
            (
                f"is {pipeline.chunks}, and pipeline.schedule is {pipeline.schedule}, with one chunk per stage. "
                "Remove it, or set schedule: interleaved."
            ),
        )
    elif pipeline.chunks == 1:
        yield Problem(
            ("pipeline", "chunks"),
            "is 1: interleaved with one chunk per stage is 1f1b. Try chunks: 2, or schedule: 1f1b.",
        )


def _choices(config: Settings) -> Iterator[Problem]:
    for key, (group, default) in PLUGIN_KEYS.items():
        value = getattr(config, key)
        if value == default:
            continue  # the others import JAX
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
    if steps and name == "sum":
        yield Problem(
            ("reducer",), f"is sum with warmup: {steps}, steps in which sum is used instead. Write reducer: sum."
        )
    elif config.steps is not None and steps >= config.steps:
        yield Problem(
            ("reducer",),
            (
                f"has warmup: {steps}, and steps is {config.steps}: {name} would never add. A warm-up ends before the "
                f"run does. Try warmup: {config.steps // 10}, or reducer: sum."
            ),
        )


def _remat(config: Settings) -> Iterator[Problem]:
    if isinstance(config.remat, str):
        return
    save, offload = config.remat.save, config.remat.offload
    if not save and not offload:
        yield Problem(("remat",), "names nothing to keep, and is then full. Write remat: full, or save: [attention].")
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
    own = config.optimizer is not None and "learning_rate" in config.optimizer
    if own and config.learning_rate is not None:
        yield Problem(
            ("optimizer", "learning_rate"),
            "is given, and the key learning_rate too. Only one can have an effect. Remove one of them.",
        )
    if isinstance(config.learning_rate, dict):
        yield from optimizer.schedule_problems(config.learning_rate, ("learning_rate",))
    if config.optimizer is not None:
        yield from optimizer.optimizer_problems(config.optimizer, config.learning_rate is not None)


def _precision(config: Settings) -> Iterator[Problem]:
    precision = config.precision
    if precision.inputs is not None and precision.compute == precision.params == "float32":
        yield Problem(
            ("precision", "inputs"),
            (
                f"is {show(precision.inputs)}, and compute and params are float32: nothing is cast, so it has no "
                "effect. Remove it, or set compute: bfloat16."
            ),
        )


def _deterministic(config: Settings) -> Iterator[Problem]:
    if config.deterministic and config.attention.implementation == "cudnn":
        yield Problem(
            ("attention", "implementation"),
            (
                "is cudnn, with a gradient that sums in another order each time, and deterministic is true. Try "
                "implementation: xla, or deterministic: false."
            ),
        )
    for name in ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops"):
        if config.deterministic and name in config.compiler_options and config.compiler_options[name] is not True:
            yield Problem(
                ("compiler_options", name),
                (
                    f"is {show(config.compiler_options[name])}, and deterministic is true, which sets it to true on "
                    "GPUs. Remove one of them."
                ),
            )


def _without_effect(config: Settings) -> Iterator[Problem]:
    layout, default = config.layout, type(config.layout)()
    if config.mesh.fsdp is None:
        for key in ("zero", "fsdp", "min_shard_bytes"):
            if (value := getattr(layout, key)) != getattr(default, key):
                yield Problem(
                    ("layout", key),
                    f"is {value}, and the mesh has no fsdp axis, so it has no effect. "
                    f"Remove it, or name the axis, for example mesh: {{fsdp: -1}}.",
                )
    elif layout.fsdp == "off" and layout.min_shard_bytes != default.min_shard_bytes:
        yield Problem(
            ("layout", "min_shard_bytes"),
            f"is {layout.min_shard_bytes}, and layout.fsdp is off, so it has no effect. Remove it, or set fsdp: auto.",
        )
    if config.mesh.context in (None, 1):
        for key in ("context", "order"):
            if (value := getattr(config.attention, key)) != getattr(type(config.attention)(), key):
                yield Problem(
                    ("attention", key),
                    f"is {value}, and the mesh has no context axis, so it has no effect. "
                    "Remove it, or name the axis, for example mesh: {context: 2}.",
                )
    elif config.attention.context == "all_to_all" and config.attention.order != "zigzag":
        yield Problem(
            ("attention", "order"),
            (
                "is contiguous, and attention.context is all_to_all, which always keeps neighbours together, so it has "
                "no effect. Remove it, or set context: ring."
            ),
        )
    if config.on_spike is not None and plugins.split(config.sync)[0] not in ("every_step", "stale"):
        yield Problem(
            ("on_spike",),
            (
                "looks at the loss of all replicas in every step, and with this sync groups of them train alone, so it "
                "has no effect. Remove it, or use sync: every_step."
            ),
        )
    if config.eval.params == "ema" and config.ema is None:
        yield Problem(
            ("eval", "params"), "is ema, and there is no average of parameters. Try ema: 0.999, or params: params."
        )
    if config.checkpoint and config.checkpoint.best and config.eval.every_steps is None:
        yield Problem(
            ("checkpoint", "best"),
            "needs evaluations while training, found eval.every_steps: null. Try eval: {every_steps: 100}.",
        )
    if config.profile and (last := config.profile.start + config.profile.steps - 1) > config.steps:
        yield Problem(
            ("profile",),
            f"covers steps {config.profile.start} to {last}, found steps: {config.steps}. The trace lies within the "
            f"run. Try profile: {{start: {max(1, config.steps - config.profile.steps + 1)}, "
            f"steps: {min(config.profile.steps, config.steps)}}}.",
        )


def _elastic(config: Settings) -> Iterator[Problem]:
    for name in ("snapshot_every", "standby", "precompile"):
        value = getattr(config.elastic, name)
        if not config.elastic.in_process and value != getattr(type(config.elastic)(), name):
            yield Problem(
                ("elastic", name),
                (
                    f"is {value}, and elastic.in_process is false, so it has no effect. Remove it, or set in_process: "
                    "true."
                ),
            )
    if config.elastic.in_process and parameter_server.is_chosen(config):
        yield Problem(
            ("elastic", "in_process"),
            (
                "is true, and with sync: parameter_server there is no step of all processes to go back to. A worker "
                "that dies is started again there anyway. Remove it."
            ),
        )


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
