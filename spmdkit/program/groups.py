"""The replica groups of a sync on a mesh, and the placement of their copies of the train state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from spmdkit.communication.reducers.base import Reducer, stateless
from spmdkit.communication.sync.base import Sync
from spmdkit.config import Config, build_optimizer, parameter_server
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins, user_code
from spmdkit.foundation.trees import first_difference
from spmdkit.mesh.layout import LayoutOptions, follow
from spmdkit.mesh.mesh import describe_mesh
from spmdkit.program import parameter_groups
from spmdkit.program.init_state import make_optimizer, recorded
from spmdkit.program.state_layout import StateLayout, layout_from_table
from spmdkit.program.step_context import reducer_of
from spmdkit.program.task import Task
from spmdkit.step.groups.groups import GROUPED, Groups, agreement_fn, mean, stack_state
from spmdkit.step.leaf_roles import for_trained


def groups_of(config: Config, sizes: Mapping[str, int], per_replica: bool) -> Groups | None:
    """Returns the groups of the config's `sync`, or None; raises ConfigError if another setting is incompatible."""
    sync = sync_of(config)
    if sync.every is None:
        return None
    name = plugins.split(config.sync)[0]
    axis = "replica" if sizes["replica"] > 1 else "data"
    if sizes[axis] == 1:
        raise ConfigError(
            f"sync: {name} has no effect on the mesh {describe_mesh(sizes)}: there is only one group of replicas. "
            "Groups lie along replica, or along data if replica is one. Try mesh: {replica: 2, ...}, or sync: "
            "every_step."
        )
    if per_replica:
        raise ConfigError(
            f"sync: {name} with view='replica': there the user's sums cross all replicas in every step. Use the "
            "global view (sk.value_and_grad), or sync: every_step."
        )
    if config.model_state != "global":
        raise ConfigError(
            f"sync: {name} with model_state: {config.model_state}: each group already has a model state. Use "
            "model_state: global."
        )
    if config.checkpoint is not None and (steps := config.checkpoint.every_steps) is not None and steps % sync.every:
        near = max(sync.every, steps // sync.every * sync.every)
        raise ConfigError(
            f"checkpoint.every_steps is {steps}, and groups are averaged every {sync.every} steps ({name}). A "
            "checkpoint is saved at the end of a round, so that it can be restored onto another number of groups. "
            f"Try checkpoint: {{every_steps: {near}}}."
        )
    in_place = "start" if sync.start else "overlap" if any(turn.overlapped for turn in sync.agreements) else ""
    if in_place and plugins.split_common_options("reducers", config.reducer)[1].get("warmup"):
        raise ConfigError(
            f"sync: {name} with {in_place}, and a reducer with warmup: both replace steps. Set warmup: 0, or remove "
            f"{in_place}."
        )
    return Groups((axis,), sizes[axis], sync, _outer_reducer(sync, config, name))


def _outer_reducer(sync: Sync, config: Config, name: str) -> Reducer | None:
    """Returns the reducer for averages over groups, without error feedback unless requested."""
    requested = sync.reducer
    if requested is None:
        return None
    built, (reducer, options) = reducer_of(config, requested), plugins.split(requested)
    has_feedback = built.init is not stateless and "error_feedback" in plugins.options("reducers", requested)
    if has_feedback and "error_feedback" not in options:
        built = reducer_of(config, {reducer: options | {"error_feedback": False}})
    if built.init is not stateless or built.warmup:
        what = "warms up" if built.warmup else "has a state"
        raise ConfigError(
            f"sync: {name}: its reducer {reducer} {what}, and outer gradients are reduced without "
            "a state. Use a reducer without a state, for example sync: "
            f"{{{name}: {{every: {sync.every}, reducer: int8}}}}."
        )
    if built.apply_with_metrics is not None:
        raise ConfigError(
            f"sync: {name}: its reducer {reducer} reports metrics of each step, and metrics of an outer reducer cannot "
            "be logged. It is for gradients. Write it as the config's reducer, and sync: "
            f"{{{name}: {{every: {sync.every}, reducer: int8}}}}."
        )
    return built


def sync_of(config: Config) -> Sync:
    """Returns the sync that a config names, built-in or user-defined; raises ConfigError if it does not exist."""
    parameter_server.refuse(config)
    if plugins.is_reference(config.sync):
        sync = user_code.named(config.sync, "sync", config.folder, Sync)
    else:
        sync = plugins.make("syncs", config.sync)
    if sync.outer_optimizer is None or sync.agree is None:
        return sync
    outer = build_optimizer(sync.outer_optimizer)
    init, agree = (functools.partial(fn, outer=outer) for fn in (sync.init, sync.agree))
    return dataclasses.replace(sync, init=init, agree=agree)


def optimizer_of(config: Config, task: Task) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer of a config and its task, in a delay line if the sync requires it. It updates only the
    parameters that the task and the config do not declare as frozen or overwritten."""
    optimizer, sync = make_optimizer(config, task), sync_of(config)
    optimizer = optimizer if sync.optimizer is None else recorded(sync.optimizer(optimizer))
    declared = parameter_groups.declared(config, task)
    return for_trained(optimizer, declared) if declared.patterns else optimizer


def check_agreement(groups: Groups, params: Any, name: str) -> Any:
    """Returns the abstract state of the sync, and checks its functions by tracing them on one copy of `params`."""
    sync, what, params = groups.sync, f"sync {name}", groups.sent(params)
    view = sync.view
    assert view is not None
    of_all = jax.tree.map(lambda x: jax.ShapeDtypeStruct((groups.num, *x.shape), x.dtype), params)
    traced: Callable[..., Any] = lambda function, fn, *args: user_code.call_user(
        lambda: jax.eval_shape(fn, *args), f"{what}: {function}"
    )
    state = traced("init", sync.init, params)
    viewed = traced("view", lambda params, state: view(params, state, mean), of_all, state)
    rule = "agree returns (one copy of the parameters, the sync state) and view one copy, as mean(params) is"
    of_shape = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32)  # dtypes are cast
    shapes: Callable[[Any], Any] = lambda tree: jax.tree.map(of_shape, tree)
    rows = [("view: the parameters", shapes(params), shapes(viewed))]
    for turn in range(len(sync.agreements)):
        call = agreement_fn(sync, turn)
        agreed = traced("agree", lambda params, state, call=call: call(params, state, mean), of_all, state)
        if not (isinstance(agreed, tuple) and len(agreed) == 2):
            raise ConfigError(
                f"{what}: agree returned {type(agreed).__name__}. {rule}. Write return new, state at its end."
            )
        agreed_params = shapes(agreed[0])
        if sync.schedule:  # a leaf may be unchanged, or averaged: [groups, ...]
            averaged = lambda x, p: jax.ShapeDtypeStruct(p.shape, x.dtype) if x.shape == (groups.num, *p.shape) else x
            agreed_params = jax.tree.map(averaged, agreed_params, params)
        rows += [("agree: the parameters", shapes(params), agreed_params), ("agree: the sync state", state, agreed[1])]
    for function, expected, found in rows:
        if difference := first_difference(expected, found):
            raise ConfigError(f"{what}: {function}: {difference}. {rule}. Do not change the shapes.")
    return state


def check_reducer(groups: Groups, config: Config) -> None:
    """Raises ConfigError for a reducer with a state in separately training groups: it cannot be averaged."""
    name, _ = plugins.split(config.reducer)
    axis = groups.axes[0]
    forgets = "error_feedback" in plugins.options("reducers", config.reducer)
    without = f", {{{name}: {{error_feedback: false}}}}," if forgets else ""
    raise ConfigError(
        f"reducer: {name} has a state, and with sync: {plugins.split(config.sync)[0]} the groups along {axis} train "
        f"alone. Inside a group only a reducer without a state is possible. Use reducer: sum{without} or sync: "
        "every_step."
    )


def place(
    groups: Groups, placed: StateLayout, params: Any, mesh: Mesh, sizes: Mapping[str, int], name: str
) -> StateLayout:
    """Returns the layout of the state of all groups from the layout of one copy. `name`: the sync, in messages."""
    sync_state = check_agreement(groups, params, name)
    abstract = jax.eval_shape(functools.partial(stack_state, groups), placed.abstract)
    axes: Any = groups.axes[0] if len(groups.axes) == 1 else groups.axes
    table = []
    for leaf in placed.table:
        if leaf.path.split("/")[0] in GROUPED:
            shape, spec = (groups.num, *leaf.shape), PartitionSpec(axes, *leaf.spec)
            leaf = dataclasses.replace(leaf, shape=shape, spec=spec)
        table.append(leaf)
    param_leaves = [
        dataclasses.replace(leaf, path=leaf.path.partition("/")[2])
        for leaf in placed.table
        if leaf.path.split("/")[0] == "params"
    ]
    sync_leaves = follow(sync_state, param_leaves, LayoutOptions(), sizes, "device")
    table += [dataclasses.replace(leaf, path=f"sync/{leaf.path}" if leaf.path else "sync") for leaf in sync_leaves]
    return layout_from_table(table, abstract, mesh, placed.placements)
