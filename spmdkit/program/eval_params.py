"""The parameters that are evaluated and exported, for optimizers that train others: schedule-free, lookahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import describe, named_leaves, path_name
from spmdkit.foundation.user_code import call_user
from spmdkit.program.groups import optimizer_of
from spmdkit.program.init_state import abstract_init
from spmdkit.program.task import Task
from spmdkit.step.groups.groups import GROUPED
from spmdkit.step.rng import abstract_key
from spmdkit.step.state import TrainState
from spmdkit.step.state import create as create_state

EvalParams = Callable[[TrainState], Any]
"""`state -> parameters` to evaluate."""


def source_of(task: Task, state: TrainState) -> str | None:
    """Returns what determines the parameters that are evaluated, if it is not the state alone."""
    if task.eval_params is not None:
        return "Task.eval_params"
    if isinstance(state.params, optax.LookaheadParams):
        return "optax.lookahead"
    return "optax.contrib.schedule_free" if _states(state.opt_state, optax.contrib.ScheduleFreeState) else None


def eval_params_of(task: Task, state: TrainState) -> EvalParams | None:
    """Returns the function of the task, or that of its optax optimizer; None: the parameters are evaluated as they are.

    Args:
        state: the abstract train state, one copy.

    Raises:
        ConfigError: `Task.eval_params` returns no arrays, or `optax.lookahead` has no pair of parameters.
    """
    source = source_of(task, state)
    if task.eval_params is not None:
        of_task = task.eval_params
        params = call_user(lambda: jax.eval_shape(of_task, state), "Task.eval_params")
        if not jax.tree.leaves(params) or isinstance(params, TrainState):
            raise ConfigError(
                f"Task.eval_params returned {describe(params)}. It returns the parameters to evaluate, a pytree of "
                "arrays like state.params."
            )
        return of_task
    if _states(state.opt_state, optax.LookaheadState) and source != "optax.lookahead":
        raise ConfigError(
            "optax.lookahead needs parameters that are a pair (fast, slow), and init returned one copy. The loss "
            "receives params.fast, and params.slow is evaluated. Return optax.LookaheadParams.init_synced(params) "
            "from init."
        )
    if source is None:
        return None
    return _schedule_free if source == "optax.contrib.schedule_free" else lambda state: state.params.slow


def evaluated_arrays(
    config: Config, task: Task, arrays: Mapping[str, np.ndarray], mean: Callable[[np.ndarray], np.ndarray] | None
) -> dict[str, np.ndarray]:
    """Returns path -> array of the parameters to evaluate from the arrays of a checkpoint, on one device.

    Args:
        mean: reduces [groups, ...] to [...]; None without groups.
    """
    init = abstract_init(task, config).init
    optimizer = optimizer_of(config, task)

    def create(key: jax.Array) -> TrainState:
        variables = init(key)
        return create_state(variables.params, variables.state, optimizer, config.seed, config.ema)

    shapes = jax.eval_shape(create, abstract_key())
    eval_params = eval_params_of(task, shapes)
    assert eval_params is not None

    def leaf(path: Any, shape: Any) -> Any:
        name = path_name(path)
        if name not in arrays:  # a random key
            return shape
        reduced = mean is not None and name.split("/")[0] in GROUPED
        return jnp.asarray(mean(arrays[name]) if reduced and mean is not None else arrays[name])

    params = call_user(lambda: eval_params(jax.tree.map_with_path(leaf, shapes)), "eval_params")
    return {path: np.asarray(x) for path, x in named_leaves(params)}


def _schedule_free(state: TrainState) -> Any:
    """Returns x = (y - (1 - b1) z) / b1 for the parameters y under `optax.contrib.schedule_free`; other parameters are
    unchanged. Source: Defazio et al., "The Road Less Scheduled" (2024)."""
    averaged: dict[str, Any] = {}
    for found in _states(state.opt_state, optax.contrib.ScheduleFreeState):
        averaged |= {path: (found.b1, z) for path, z in named_leaves(found.z)}

    def leaf(path: Any, y: jax.Array) -> jax.Array:
        if (pair := averaged.get(path_name(path))) is None:
            return y
        b1, z = pair
        x: jax.Array = (y - (1.0 - b1) * z) / b1
        return x.astype(y.dtype)

    return jax.tree.map_with_path(leaf, state.params)


def _states(opt_state: Any, kind: Any) -> list[Any]:
    """Returns all states of one kind in the state of an optimizer."""
    is_kind: Callable[[Any], bool] = lambda x: isinstance(x, kind)
    return [x for x in jax.tree.leaves(opt_state, is_leaf=is_kind) if is_kind(x)]
