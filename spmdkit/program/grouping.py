"""The groups that a config asks for on a mesh, and where their copies of the train state live."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from spmdkit import kinds, user_code
from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.layout import LayoutOptions, LeafPlacement, follow
from spmdkit.mesh import describe_mesh
from spmdkit.program.state_layout import StateLayout, laid_out
from spmdkit.step.groups import GROUPED, Groups, agreed, mean, stacked
from spmdkit.step.state import TrainState
from spmdkit.sync.base import Sync
from spmdkit.tree import first_difference


def groups_of(config: Config, sizes: Mapping[str, int], per_replica: bool) -> Groups | None:
    """Returns the groups that the config's `sync` asks for, or None where replicas agree in every step.

    Raises:
        ConfigError: there is only one group, or something else in the config needs all replicas in every step.
    """
    sync = sync_of(config)
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


def sync_of(config: Config) -> Sync:
    """Returns the sync that a config names: one of the package, or a user's own.

    Raises:
        ConfigError: there is none of that name, it is not declared, or the options are not its.
    """
    if kinds.is_own(config.sync):
        return user_code.named(config.sync, "sync", config.folder, Sync)
    made: Sync = kinds.make("sync", config.sync)
    return made


def check_agreement(groups: Groups, params: Any, name: str) -> Any:
    """Returns what the sync keeps, abstract, after its functions were traced on `params`, one copy.

    Raises:
        ConfigError: what it agrees on or shows is not one copy of the parameters, or it does not keep what it began with.
        UserCodeError: a function of it raised.
    """
    sync, what = groups.sync, f"sync {name}"
    agree, view = sync.agree, sync.view
    assert agree is not None and view is not None
    of_all = jax.tree.map(lambda x: jax.ShapeDtypeStruct((groups.num, *x.shape), x.dtype), params)
    traced = lambda function, fn, *args: user_code.call_user(lambda: jax.eval_shape(fn, *args), f"{what}: {function}")
    kept = traced("init", sync.init, params)
    agreed = traced("agree", lambda params, kept: agree(params, kept, mean), of_all, kept)
    shown = traced("view", lambda params, kept: view(params, kept, mean), of_all, kept)
    rule = "agree returns (one copy of the parameters, what is kept) and view one copy, as mean(params) is"
    if not (isinstance(agreed, tuple) and len(agreed) == 2):
        raise ConfigError(f"{what}: agree returned {type(agreed).__name__}. {rule}. Write return new, kept at its end.")
    shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), tree)  # dtypes are cast
    for function, asked, found in (
        ("agree: the parameters", shapes(params), shapes(agreed[0])),
        ("agree: what is kept", kept, agreed[1]),
        ("view: the parameters", shapes(params), shapes(shown)),
    ):
        if difference := first_difference(asked, found):
            raise ConfigError(f"{what}: {function}: {difference}. {rule}. Keep the shapes as they are.")
    return kept


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


def place(
    groups: Groups, placed: StateLayout, params: Any, mesh: Mesh, sizes: Mapping[str, int], name: str
) -> tuple[TrainState, StateLayout]:
    """Returns (the abstract train state of all groups, where its leaves live) from the layout of one copy.

    Args:
        name: of the sync, as messages call it.
    """
    sync_keeps = check_agreement(groups, params, name)
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
    kept = follow(sync_keeps, own, LayoutOptions(), sizes, "device")
    table += [_under_sync(leaf) for leaf in kept]
    return abstract, laid_out(table, abstract, mesh, placed.placements)


def _under_sync(leaf: LeafPlacement) -> LeafPlacement:
    return dataclasses.replace(leaf, path=f"sync/{leaf.path}" if leaf.path else "sync")


def agreement(groups: Groups | None, to_device: Callable[[TrainState], TrainState], state_sharding: Any) -> Any:
    """Returns the jitted program in which groups agree, state -> state; the state is donated."""

    def agreement(current: TrainState) -> TrainState:
        assert groups is not None
        return agreed(groups, to_device(current))

    return jax.jit(agreement, out_shardings=state_sharding, donate_argnums=0)
