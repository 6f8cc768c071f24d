"""The layout of the full train state: the table of the parameters, and the leaves that follow it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import named_leaves
from spmdkit.mesh import layout
from spmdkit.mesh.annotations import Annotations
from spmdkit.mesh.layout import LeafPlacement
from spmdkit.step import trace_context
from spmdkit.step.state import FIELDS, TrainState

Rules = Sequence[tuple[str, Sequence[Any]]]


class StateLayout(NamedTuple):
    """The placement of every leaf of a train state.

    Attributes:
        table: placement of each leaf, with the reason, in flattening order.
        sharding: a `TrainState` of shardings.
        abstract: a `TrainState` of `jax.ShapeDtypeStruct` with shardings.
        placements: placements of parameters, gradients and updates inside the step.
    """

    table: list[LeafPlacement]
    sharding: TrainState
    abstract: TrainState
    placements: trace_context.Placements


def state_groups(config: Config, stateful: bool, per_replica: bool, num_replicas: int) -> int | None:
    """Returns the number of replica groups with separate model states, or None if all replicas share one."""
    requested = config.model_state
    if requested == "global":
        return None
    if not stateful:
        raise ConfigError(
            f"model_state: {requested} has no effect: init returns no state. Return sk.Variables(params, state)."
        )
    if per_replica:
        raise ConfigError(
            "model_state other than global needs the global view; this task has view='replica'. Use model_state: "
            "global."
        )
    size = 1 if requested == "replica" else requested.group
    if num_replicas % size:
        raise ConfigError(
            f"model_state.group is {size}, the mesh has {num_replicas} replicas. Groups have to be equal: {size} must "
            f"divide {num_replicas}."
        )
    return num_replicas // size


def place_state(
    config: Config,
    task_rules: Rules,
    annotations: Annotations,
    abstract: TrainState,
    params: Any,
    mesh: Mesh,
    sizes: Mapping[str, int],
) -> StateLayout:
    """Returns the layout of `abstract`, the train state without shardings. `params` have the metadata of the model."""
    zero = config.layout.zero
    options = _options(config, task_rules, annotations)
    full = layout.lay_out(params, options, sizes)
    layout.check_axes_used(full, sizes)
    own_spec: Callable[[layout.LeafPlacement], PartitionSpec] = lambda p: (
        p.spec if zero == 3 else layout.without_fsdp(p.spec, sizes)
    )
    stored = [dataclasses.replace(p, spec=own_spec(p), memory_kind=_memory_kind(config, "params")) for p in full]
    follow = functools.partial(layout.follow, params=full, options=options, sizes=sizes)
    update_kind = _memory_kind(config, "optimizer")
    whole = functools.partial(layout.LeafPlacement, spec=PartitionSpec(), memory_kind="device")
    a = abstract
    parts = {
        "step": [whole("", (), a.step.dtype, reason="scalar")],
        "params": stored,
        "opt_state": follow(a.opt_state, memory_kind=update_kind),
        "model_state": [whole(path, x.shape, x.dtype, reason="model state") for path, x in named_leaves(a.model_state)],
        "ema": follow(a.ema, memory_kind=update_kind),
        "rng": [whole("", a.rng.shape, a.rng.dtype, reason="random key")],
    }
    table = [
        dataclasses.replace(p, path=f"{field}/{p.path}" if p.path else field)
        for field in FIELDS
        for p in parts.get(field, ())
    ]
    in_tree = functools.partial(jax.tree.unflatten, jax.tree.structure(params))
    placements = trace_context.Placements(
        compute=in_tree([p.spec for p in stored]),
        gradient=in_tree([p.spec for p in (stored if zero == 1 else full)]),
        update=in_tree([p.spec for p in full]),
        shapes={path: x.shape for path, x in named_leaves(params)},
    )
    return layout_from_table(table, abstract, mesh, placements)


def _memory_kind(config: Config, part: str) -> str:
    return "pinned_host" if part in config.offload else "device"


def _options(config: Config, task_rules: Rules, annotations: Annotations) -> layout.LayoutOptions:
    return layout.LayoutOptions(
        config_rules=tuple((pattern, tuple(dims)) for pattern, dims in config.layout.rules),
        task_rules=tuple((pattern, tuple(dims)) for pattern, dims in task_rules),
        annotations=annotations,
        axes=layout.logical_axes(config.roles, annotations.rules, config.layout.axes),
        fsdp=config.layout.fsdp,
        min_shard_bytes=config.layout.min_shard_bytes,
        replicate_above_bytes=config.layout.replicate_above_bytes,
    )


def layout_from_table(
    table: list[LeafPlacement], abstract: TrainState, mesh: Mesh, placements: trace_context.Placements
) -> StateLayout:
    """Returns the layout of `abstract` with the placements of `table`, in flattening order."""
    treedef = jax.tree.structure(abstract)
    shardings = [p.sharding(mesh) for p in table]
    leaves = [jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s) for p, s in zip(table, shardings, strict=True)]
    return StateLayout(table, jax.tree.unflatten(treedef, shardings), jax.tree.unflatten(treedef, leaves), placements)


def to_device(table: Sequence[LeafPlacement], mesh: Mesh, state: TrainState) -> TrainState:
    """Returns the state with its host leaves copied to the devices, inside a step."""

    def bring(x: Any, placement: LeafPlacement) -> Any:
        if placement.memory_kind == "device":
            return x
        return jax.device_put(x, dataclasses.replace(placement, memory_kind="device").sharding(mesh))

    if all(p.memory_kind == "device" for p in table):
        return state
    leaves, treedef = jax.tree.flatten(state)
    moved: TrainState = jax.tree.unflatten(treedef, [bring(x, p) for x, p in zip(leaves, table, strict=True)])
    return moved
