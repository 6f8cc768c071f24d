"""Derives from a config the context of a step, which functions read while they are traced, the form of a step on a
mesh, and the reducer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from spmdkit.communication.reducers.base import Reducer
from spmdkit.config import Config
from spmdkit.config.fields import widest
from spmdkit.errors import ConfigError
from spmdkit.foundation import jaxprs, plugins, user_code
from spmdkit.mesh import layout
from spmdkit.mesh.annotations import Rules
from spmdkit.mesh.mesh import MODEL_AXES, REPLICA_AXES
from spmdkit.ops.remat import policy, policy_of_names
from spmdkit.program.task import Task
from spmdkit.program.xla_defects import MANUAL
from spmdkit.step import finite_check, trace_context
from spmdkit.step.leaf_roles import Roles


def step_context(
    config: Config,
    mesh: Mesh,
    sizes: Mapping[str, int],
    *,
    data_axes: tuple[str, ...],
    rules: Rules,
    placements: trace_context.Placements,
    state_groups: int | None,
    state_reduction: Mapping[str, Any],
    roles: Roles,
    unread: frozenset[str],
) -> trace_context.Context:
    """Returns the step context of a config with a fixed number of microbatches, without a form. `rules`: flax's logical
    axis rules of the user; without any, `layout.axes` has their place."""
    table = layout.logical_axes(config.roles, rules, config.layout.axes)
    dtypes, remat, pipeline = config.precision, config.remat, config.pipeline
    assert isinstance(config.microbatches, int)
    chosen = trace_context.StepOptions(
        compute_dtype=None if {dtypes.compute, dtypes.params} == {"float32"} else jnp.dtype(dtypes.compute),
        inputs=dtypes.inputs or "compute",
        gradient_dtype=jnp.dtype(widest("float32", dtypes.params, dtypes.reduction)),
        reduction_dtype=jnp.dtype(dtypes.reduction),
        float8=dtypes.matmul == "float8",
        rounds_stochastically=dtypes.rounding == "stochastic",
        reducer=reducer_of(config),
        remat=policy(remat) if isinstance(remat, str) else policy_of_names(remat.save, remat.offload),
        state_reduction=state_reduction,
        roles=roles,
        unread=unread,
        logical_axes=table,
        flax_rules=rules or (tuple(table.items()) if config.layout.axes else ()),
        attention=trace_context.AttentionSettings(**config.attention.model_dump()),
        pipeline=trace_context.PipelineSettings(
            pipeline.schedule,
            pipeline.microbatches,
            (pipeline.chunks or 2) if pipeline.schedule == "interleaved" else 1,
        ),
        guard=guard_of(config),
        deterministic=config.deterministic,
    )
    cuts = trace_context.ShardingSpec(
        mesh=mesh,
        sizes=sizes,
        roles=config.roles,
        data_axes=data_axes,
        inner_axes=tuple(a for a in ("fsdp", "expert") if a not in data_axes),
        microbatches=config.microbatches,
        placements=placements,
        state_groups=state_groups,
    )
    return trace_context.Context(cuts, chosen)


def guard_of(config: Config) -> trace_context.GuardSettings | None:
    """Returns the finite checks of the step, or None if the config disables them all."""
    policies = config.policies()
    bits: Callable[..., int] = lambda *which: sum(
        finite_check.KINDS[name] for name, policy in policies.items() if policy in which
    )
    looks = bits("stop", "skip", "rollback")
    return trace_context.GuardSettings(looks, bits("skip"), bits("skip", "rollback") > 0) if looks else None


def reducer_of(config: Config, choice: str | Mapping[str, Any] | None = None) -> Reducer:
    """Returns the reducer that a config names, or `choice`: built-in, or user-defined in a file under the config's
    folder. Raises ConfigError if it does not exist or does not have these options."""
    choice = config.reducer if choice is None else choice
    if plugins.is_reference(choice):
        choice, common = plugins.split_common_options("reducers", choice)
        return dataclasses.replace(user_code.named(choice, "reducer", config.folder, Reducer), **common)
    reducer: Reducer = plugins.make("reducers", choice)
    return reducer


def form_of(task: Task, sizes: Mapping[str, int], num_replicas: int) -> trace_context.Form:
    """Returns the form of a step on a mesh. A `plain` step that names replica axes becomes `mapped`. Raises ConfigError
    for a per-replica step on a mesh with model axes."""
    model_axes = [a for a in MODEL_AXES if sizes[a] > 1]
    if task.is_manual:
        if model_axes:
            raise ConfigError(
                f"view='replica' on a mesh with model axes {model_axes}: a per-replica step uses unsharded "
                "parameters. Use only replica and data in the mesh, or the global view (sk.value_and_grad)."
            )
        return "manual"
    if num_replicas == 1:
        return "plain"
    return "mapped" if model_axes or task.axis_name is not None else "manual"


def names_replicas(jaxpr: Any) -> bool:
    """Returns whether an operation outside of `shard_map` names a replica axis."""
    equations = jaxprs.equations(jaxpr, into=lambda eqn: eqn.primitive.name not in MANUAL)
    return any(not jaxprs.axis_names(eqn).isdisjoint(REPLICA_AXES) for eqn in equations)
