"""Groups of replicas that train alone, and agree now and then: the train state that holds one copy for each, and what crosses between them.

What a group does in a step is the step of the mesh without the sync's axes (group_step.py); when they agree is the sync's (sync/).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from spmdkit import agree, compat, kinds, scope
from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.jaxprs import equations
from spmdkit.layout import LayoutOptions, LeafPlacement, follow
from spmdkit.means import Mean
from spmdkit.mesh import describe_mesh
from spmdkit.state import TrainState
from spmdkit.state_layout import StateLayout, laid_out
from spmdkit.sync.base import Sync

GROUPED = ("params", "opt_state", "model_state", "ema")
"""The fields of a train state that each group has of its own: leaves [groups, ...]."""


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of a program.

    Attributes:
        axes: the mesh axes along which they lie.
        num: of groups.
        sync: when they agree.
    """

    axes: tuple[str, ...]
    num: int
    sync: Sync

    def inner(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of the mesh of one group."""
        return dict(sizes) | dict.fromkeys(self.axes, 1)


def groups_of(config: Config, sizes: Mapping[str, int], per_replica: bool) -> Groups | None:
    """Returns the groups that the config's `sync` asks for, or None where replicas agree in every step.

    Raises:
        ConfigError: there is only one group, or something else in the config needs all replicas in every step.
    """
    sync: Sync = kinds.make("sync", config.sync)
    if sync.every is None:
        return None
    name = kinds.split(config.sync)[0]
    axis = "replica" if sizes["replica"] > 1 else "data"
    if sizes[axis] == 1:
        raise ConfigError(
            f"sync: {name} has no effect on the mesh {describe_mesh(sizes)}: there is one group of replicas, which has nobody to agree with. Groups lie "
            "along replica, or data where replica is one. Try mesh: {replica: 2, ...}, or sync: every_step."
        )
    if per_replica:
        raise ConfigError(
            f"sync: {name} with view='replica': there the user's own sums cross all replicas in every step. Use the global view "
            "(sk.value_and_grad), or sync: every_step."
        )
    if config.model_state != "global":
        raise ConfigError(
            f"sync: {name} with model_state: {config.model_state}: each group has a model state of its own already. Use model_state: global."
        )
    if config.checkpoint is not None and (steps := config.checkpoint.every_steps) is not None and steps % sync.every:
        near = max(sync.every, steps // sync.every * sync.every)
        raise ConfigError(
            f"checkpoint.every_steps is {steps}, and groups agree every {sync.every} steps ({name}). A checkpoint stands at the end of a round, so "
            f"that it can be restored onto another number of groups. Try checkpoint: {{every_steps: {near}}}."
        )
    return Groups((axis,), sizes[axis], sync)


def check_reducer(groups: Groups, config: Config) -> None:
    """Refuses a reducer that keeps something while groups train alone: what becomes of it when they agree is not defined.

    Raises:
        ConfigError: always.
    """
    name, _ = kinds.split(config.reducer)
    axis = groups.axes[0]
    raise ConfigError(
        f"reducer: {name} keeps something from step to step, and sync: {kinds.split(config.sync)[0]} lets the groups along {axis} train alone. Inside a "
        f"group only a reducer without a state can add. Use reducer: sum, {{{name}: {{error_feedback: false}}}}, or sync: every_step."
    )


def check_alone(groups: Groups, jaxpr: Any, what: str) -> None:
    """Refuses a step in which the user's own code sends something between groups.

    Raises:
        ConfigError: a collective names one of their axes.
    """
    for eqn in equations(jaxpr):
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        names = (named,) if isinstance(named, str) else tuple(named) if isinstance(named, tuple | list) else ()
        if set(names) & set(groups.axes) and eqn.primitive.name not in ("axis_index", "pvary", "pcast"):
            raise ConfigError(
                f"{what}: {eqn.primitive.name} over {groups.axes[0]} at {compat.source_line(eqn)}: with this sync the groups along "
                f"{groups.axes[0]} train alone, and nothing crosses them in a step. Remove it, or use sync: every_step."
            )


# ---- the train state ----------------------------------------------------------------------------------------------------


def stacked(groups: Groups, state: TrainState) -> TrainState:
    """Returns the train state of all groups from that of one: the same copy for each."""
    copies = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (groups.num, *x.shape)), tree)
    own = {name: copies(getattr(state, name)) for name in GROUPED}
    return state.replace(**own, sync=groups.sync.init(state.params))


def place(
    groups: Groups, placed: StateLayout, params: Any, mesh: Mesh, sizes: Mapping[str, int]
) -> tuple[TrainState, StateLayout]:
    """Returns (the abstract train state of all groups, where its leaves live) from the layout of one copy."""
    abstract = jax.eval_shape(functools.partial(stacked, groups), placed.abstract)
    axes: Any = groups.axes[0] if len(groups.axes) == 1 else groups.axes
    table = []
    for leaf in placed.table:
        if leaf.path.split("/")[0] in GROUPED:
            shape, spec = (groups.num, *leaf.shape), PartitionSpec(axes, *leaf.spec)
            leaf = dataclasses.replace(leaf, shape=shape, spec=spec)
        table.append(leaf)
    own = [
        dataclasses.replace(leaf, path=leaf.path.partition("/")[2])
        for leaf in placed.table
        if leaf.path.split("/")[0] == "params"
    ]
    kept = follow(jax.eval_shape(groups.sync.init, params), own, LayoutOptions(), sizes, "device")
    table += [_under_sync(leaf) for leaf in kept]
    return abstract, laid_out(table, abstract, mesh, placed.placements)


def _under_sync(leaf: LeafPlacement) -> LeafPlacement:
    return dataclasses.replace(leaf, path=f"sync/{leaf.path}" if leaf.path else "sync")


# ---- what crosses -------------------------------------------------------------------------------------------------------


def mean(tree: Any) -> Any:
    """Returns [...] from [groups, ...]: the mean of floats, in float32 or wider, and the first of everything else."""

    def one(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x[0]
        return x.astype(jnp.promote_types(x.dtype, jnp.float32)).mean(0).astype(x.dtype)

    return jax.tree.map(one, tree)


def agreed(groups: Groups, state: TrainState) -> TrainState:
    """Returns the state in which all groups have what they agree on."""
    assert groups.sync.agree is not None
    with jax.named_scope(scope.SYNC):
        params, kept = groups.sync.agree(state.params, state.sync, mean)
    same = jax.tree.map(lambda x, p: jnp.broadcast_to(x, p.shape).astype(p.dtype), params, state.params)
    return state.replace(params=same, sync=kept)


def whole(groups: Groups, state: TrainState, said: agree.Kinds) -> TrainState:
    """Returns the one copy of the state that is evaluated and exported.

    Args:
        said: how the task says that replicas agree on leaves of the model state.
    """
    assert groups.sync.view is not None
    return state.replace(
        params=groups.sync.view(state.params, state.sync, mean),
        opt_state=mean(state.opt_state),
        model_state=agree.of_groups(said, state.model_state),
        ema=mean(state.ema),
    )


def added(metrics: Mapping[str, Mean]) -> dict[str, jax.Array]:
    """Returns the metrics over all groups from (sum, count) of each, [groups]."""
    return {name: jax.tree.map(lambda x: x.sum(0), metric).value for name, metric in metrics.items()}


def regrouped(state: TrainState, had_groups: bool, groups: Groups | None, said: agree.Kinds) -> TrainState:
    """Returns the state of these groups (None: of replicas that agree in every step) from one of another number of groups.

    The old groups agree by their mean, whatever their sync was, and each new group gets a copy.
    """
    if had_groups:
        fields = {name: mean(getattr(state, name)) for name in ("params", "opt_state", "ema")}
        state = state.replace(**fields, model_state=agree.of_groups(said, state.model_state))
    return state if groups is None else stacked(groups, state)
