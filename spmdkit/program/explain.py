"""Lists everything that was applied to a step, in order, with reasons, for `program.explain()` and `spmdkit layout`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp

from spmdkit.communication.reducers.base import stateless
from spmdkit.foundation import plugins
from spmdkit.foundation.formatting import columns, format_bytes, shown, shown_axes
from spmdkit.mesh.annotations import describe_rules
from spmdkit.mesh.layout import table
from spmdkit.mesh.mesh import describe_mesh
from spmdkit.program.eval_params import source_of
from spmdkit.program.groups import sync_of
from spmdkit.program.row_table import Row, table_lines
from spmdkit.program.task_step import TaskStep
from spmdkit.step import reducer_state
from spmdkit.step.trace_context import Context

LARGEST = 3
"""Maximum number of parameters that are listed on separate lines."""

Line = tuple[str, str]


def explain(task_step: TaskStep, context: Context, refused: str, rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Returns the lines for a step.

    Args:
        refused: why the step is not `manual`.
        rows: how rows enter.
        notes: notes of the program.
    """
    lines = [
        ("mesh", f"{describe_mesh(task_step.sizes)}: {math.prod(task_step.sizes.values())} devices"),
        *_layout(task_step, context),
        ("offload", _offload(task_step)),
        ("form", _form(task_step, context, refused)),
        ("precision", _precision(task_step)),
        ("microbatches", _microbatches(context, task_step.config.largest_batch)),
        ("remat", _remat(task_step, context)),
        *_parts(task_step, context),
        *_roles(task_step, context),
        *_groups(task_step),
        *_count(context),
        ("reducer", _reducer(task_step, context)),
        *_model_state(task_step, context),
        ("update", _update(task_step)),
        *_evaluation(task_step),
        ("guard", _guard(task_step)),
        ("hooks", _hooks(task_step)),
        ("sync", _sync(task_step)),
        *(("note", note) for note in notes),
        *(("note", _user_mesh(*names)) for names in sorted(context.usage.user_meshes)),
        *(("note", _dropped_jit(text)) for text in sorted(context.usage.dropped_jits)),
    ]
    table = table_lines(rows)
    return "\n".join([*columns(lines), *([""] if table else []), *table])


def _user_mesh(mesh: str, meaning: str) -> str:
    """Returns the note about a mesh of the user."""
    why = (
        f"apply to the program's: {meaning}"
        if meaning
        else "have no effect: its devices or shape are not the program's"
    )
    return f"sharding constraints of a mesh {mesh} {why}"


def _dropped_jit(text: str) -> str:
    """Returns the note about a jitted function inside the step."""
    return f"{text}: no effect, since the program donates its state and the layout shards its arrays"


def _layout(task_step: TaskStep, context: Context) -> Iterator[Line]:
    leaves = [p for p in task_step.state.table if p.path.split("/")[0] == "params"]
    reasons = Counter(p.reason.partition(" '")[0].partition(":")[0] for p in leaves)  # without the name of the leaf
    zero = ""
    if task_step.sizes["fsdp"] > 1:
        what = ("optimizer state", "gradients", "parameters")[: task_step.config.layout.zero]
        zero = f"; zero {task_step.config.layout.zero}: fsdp shards {', '.join(what)}"
    counts = ", ".join(f"{reason} {num}" for reason, num in reasons.most_common())
    yield "layout", f"{len(leaves)} parameters, {format_bytes(sum(p.num_bytes for p in leaves))}: {counts}{zero}"
    if context.options.flax_rules:
        yield "  flax's rules", describe_rules(context.options.flax_rules)
    largest = sorted(leaves, key=lambda p: -p.num_bytes)[:LARGEST]
    yield from (("  largest", line) for line in table(largest))


def _offload(task_step: TaskStep) -> str:
    on_host = ", ".join(f"{name} on the host" for name in task_step.config.offload)
    return f"{on_host}: copied to the devices in the step" if on_host else "none: all on the devices"


def _form(task_step: TaskStep, context: Context, refused: str) -> str:
    replicas, model = context.sharding.num_replicas, _model_axes(context)
    inside = "" if task_step.groups is None else " inside each group"
    why = {
        "plain": f"one replica{inside}, so nothing is reduced; the partitioner shards the rest",
        "mapped": f"vmap over {_many(replicas, 'replica')}{inside}; the partitioner shards the "
        f"rest{f' ({model})' if model else ''}{'' if replicas > 1 else '; the step names a replica axis'}",
        "manual": f"shard_map over {_many(replicas, 'replica')}; the mesh has no larger model axis",
    }[context.sharding.form]
    if task_step.groups is None and math.prod(context.sharding.sizes.values()) < math.prod(task_step.sizes.values()):
        mode = "JAX's explicit sharding mode" if context.sharding.explicit else "not mapped, since the loss cannot be"
        why = f"{mode}, on global arrays; the partitioner adds the reductions"
    if task_step.task.is_manual:
        why = f"shard_map over {_many(replicas, 'replica')}, since the task has view='replica'"
    tried = f"; not manual: {refused.splitlines()[0]}" if refused else ""
    return f"{context.sharding.form}: {why}{tried}"


def _model_axes(context: Context) -> str:
    sharding = context.sharding
    return ", ".join(map(shown, sharding.larger(a for a in sharding.sizes if a not in sharding.replica_axes)))


def _many(num: int, word: str) -> str:
    return f"{num} {word}{'s' * (num != 1)}"


def _precision(task_step: TaskStep) -> str:
    requested = task_step.config.precision
    inputs = ""
    if {requested.compute, requested.params} != {"float32"}:
        cast = {"compute": "cast too", "given": "as they are"}
        inputs = f", floats of a batch {cast.get(str(requested.inputs or 'compute'), f'cast where {requested.inputs}')}"
    rounded = " rounded stochastically" if requested.rounding == "stochastic" else ""
    params = f"parameters {requested.params}{rounded}"
    return f"compute {requested.compute}, {params}, gradients added over devices in {requested.reduction}{inputs}"


def _microbatches(context: Context, batch_size: int) -> str:
    num = context.sharding.microbatches
    if num == 1:
        return f"1: the whole batch of {batch_size}"
    return f"{num} of {batch_size // num} examples, in sequence; their gradients are summed before the reducer"


def _remat(task_step: TaskStep, context: Context) -> str:
    requested = task_step.config.remat
    if context.options.remat is None:
        return "none: all residuals of the backward pass are saved"
    name = requested if isinstance(requested, str) else f"save {requested.save}, offload {requested.offload}"
    whole = "the whole loss, since the step calls no sk.remat"
    return f"{name}: around {whole if context.options.remat_whole else 'each part under sk.remat'}"


def _parts(task_step: TaskStep, context: Context) -> Iterator[Line]:
    if context.usage.has_called("pipeline") and task_step.sizes["pipeline"] > 1:
        yield "pipeline", f"{context.options.pipeline.schedule} in {task_step.sizes['pipeline']} stages"
    if context.usage.has_called("attention"):
        around = f", {context.options.attention.context} over context" if task_step.sizes["context"] > 1 else ""
        tiles = "".join(f"; splash: {tiles}" for tiles in sorted(context.usage.tiles))
        yield "attention", f"{context.options.attention.implementation}{around}{tiles}"


def _roles(task_step: TaskStep, context: Context) -> Iterator[Line]:
    texts = {
        "frozen": "not differentiated, reduced or checked",
        "overwritten": "the gradient is the new value: the maximum over replicas and microbatches",
    }
    placed = {p.path.removeprefix("params/"): p for p in task_step.state.table if p.path.startswith("params/")}
    for role, text in texts.items():
        if paths := [path for path, found in context.options.roles.items() if found == role]:
            size = format_bytes(sum(placed[path].num_bytes for path in paths if path in placed))
            more = f" and {len(paths) - LARGEST} more" if len(paths) > LARGEST else ""
            yield role, f"{', '.join(paths[:LARGEST])}{more} ({size}): {text}"


def _groups(task_step: TaskStep) -> Iterator[Line]:
    paths = [p.path.removeprefix("params/") for p in task_step.state.table if p.path.startswith("params/")]
    for i, group in enumerate(task_step.config.groups):
        if group.changes:
            matched = [path for path in paths if re.fullmatch(group.match, path)]
            more = f" and {len(matched) - LARGEST} more" if len(matched) > LARGEST else ""
            text = ", ".join(f"{key} {value:g}" for key, value in group.changes.items())
            yield f"groups[{i}]", f"{', '.join(matched[:LARGEST])}{more}: {text}"


def _count(context: Context) -> Iterator[Line]:
    if context.usage.has_called("count_first"):
        wire = ": one more all-reduce of a few numbers" if context.sharding.num_replicas > 1 else ""
        reason = "1 / count is the cotangent of a loss with a custom_vjp, float16 or float8, or several means"
        yield "count", f"depends on data, and is added before the backward pass, since {reason}{wire}"


def _reducer(task_step: TaskStep, context: Context) -> str:
    reducer, (name, options) = context.options.reducer, plugins.split(task_step.config.reducer)
    added: Counter[tuple[str, ...]] = Counter()  # replica axes -> gradient values that a device reduces over them
    for leaf in reducer_state.reduced_leaves(context):
        added[tuple(leaf.axes)] += leaf.size
    by_partitioner = "; over fsdp the partitioner reduces" if "fsdp" in context.sharding.larger(("fsdp",)) else ""
    by_partitioner = "" if "fsdp" in context.sharding.data_axes else by_partitioner
    if not added:
        return f"{name}: not used, since nothing is reduced over replicas{by_partitioner}"
    if not context.usage.has_called("value_and_grad"):
        return f"{name}: not used, since train_step never calls sk.value_and_grad{by_partitioner}"
    itemsize = jnp.dtype(task_step.config.precision.reduction).itemsize
    plain = lambda leaves: sum(2 * (x.num - 1) / x.num * itemsize * x.size for x in leaves)
    replicas: Callable[[tuple[str, ...]], str] = lambda axes: (
        f"{shown_axes(axes)} ({context.sharding.size(*axes)} replicas)"
    )
    reductions = ", ".join(f"{values} values over {replicas(axes)}" for axes, values in added.items())
    sent = (plain if reducer.is_sum else reducer.bytes_sent)(reducer_state.reduced_leaves(context))
    options = {option: value for option, value in options.items() if option != "warmup"}
    option_text = f" {options}" if options else ""
    first = f"sum to step {reducer.warmup}, then " if reducer.warmup else ""
    storage = "" if reducer.init is stateless else "; stores its error in the train state"
    return (
        f"{first}{name}{option_text}: {reductions}, {sent:.0f} B sent per device for each gradient; input scale "
        f"{reducer.input_scale}{storage}{by_partitioner}"
    )


def _model_state(task_step: TaskStep, context: Context) -> Iterator[Line]:
    if task_step.stateful:
        num = context.sharding.state_groups
        yield "model state", "one for all replicas" if num is None else f"{num}, one for each group of replicas"


def _update(task_step: TaskStep) -> str:
    config = task_step.config
    name = "the task's optimizer" if config.optimizer is None else config.optimizer["name"]
    clip = "" if config.clip_norm is None else f"gradient clipped to a global norm of {config.clip_norm:g}, then "
    ema = "" if config.ema is None else f", then a moving average of the parameters ({config.ema:g})"
    suffix = " in train_step" if task_step.task.train_step is not None else ""
    return f"{clip}{name}{suffix}{ema}"


def _evaluation(task_step: TaskStep) -> Iterator[Line]:
    source = source_of(task_step.task, task_step.state.abstract)
    if task_step.config.eval.params == "params" and source:
        yield "evaluation", f"of the parameters that {source} defines, which are exported too"


def _guard(task_step: TaskStep) -> str:
    policies = task_step.config.policies()
    by_policy = {p: [name for name, other in policies.items() if other == p] for p in ("stop", "skip", "rollback")}
    joins = bool(by_policy["skip"] or by_policy["rollback"])
    looks = "; ".join(f"{policy} at {', '.join(names)}" for policy, names in by_policy.items() if names)
    if not looks:
        return "none: the step checks nothing"
    return looks + ("; one more all-reduce of a scalar" if joins else ", without communication")


def _hooks(task_step: TaskStep) -> str:
    hooks = sorted(task_step.task.hooks, key=lambda hook: hook.order)
    inside, outside = ([hook.name for hook in hooks if (hook.in_step is not None) is inner] for inner in (True, False))
    text = f"in the step, in this order: {', '.join(inside)}" if inside else "none in the step"
    return text + (f"; outside of the step: {', '.join(outside)}" if outside else "")


def _sync(task_step: TaskStep) -> str:
    name, groups = plugins.split(task_step.config.sync)[0], task_step.groups
    if groups is None:
        description = sync_of(task_step.config).description
        return f"{name}: replicas are synchronous in every step{', ' if description else ''}{description}"
    return (
        f"{name}: {groups.num} groups along {shown_axes(groups.axes)} train separately, and are averaged after every "
        f"{_many(groups.sync.every or 1, 'step')} in a separate "
        f"program{'; ' if groups.sync.description else ''}{groups.sync.description}"
    )
