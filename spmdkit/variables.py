"""What a task brings to the train state, before any array is made: its variables, checked and traced, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmdkit.checks import call_user
from spmdkit.config import Config, choose_optimizer
from spmdkit.errors import ConfigError
from spmdkit.state import Variables
from spmdkit.task import Task
from spmdkit.tree import named_leaves


def abstract_init(task: Task, config: Config) -> tuple[Callable[[jax.Array], Variables], Any, Any]:
    """Returns (init that always gives `Variables`, parameters in `precision.params`; abstract parameters and model state).

    Raises:
        ConfigError: `init` returns no arrays, or 64-bit ones.
    """

    def init(key: jax.Array) -> Variables:
        out = task.init(key)
        variables = out if isinstance(out, Variables) else Variables(out, None)
        for path, leaf in named_leaves(variables):
            if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
                raise ConfigError(
                    f"init returned {type(leaf).__name__} at '{path}'. Every leaf of the parameters is an array. "
                    "Use jnp.asarray for numbers, and keep what is no array out of the pytree."
                )
        return jax.tree.map(jnp.asarray, variables)

    def init_as_stored(key: jax.Array) -> Variables:
        variables = init(key)
        return variables._replace(params=jax.tree.map(lambda x: x.astype(config.precision.params), variables.params))

    shapes = call_user(lambda: jax.eval_shape(init, jax.random.key(config.seed)), "init")
    if not jax.tree.leaves(shapes.params):
        raise ConfigError("init returned no arrays. The parameters are a pytree with at least one array.")
    for path, leaf in named_leaves(shapes.params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigError(
                f"init returned parameter '{path}' as {leaf.dtype}. Parameters are floating point, since they have a gradient. "
                "Return other arrays as model state: sk.Variables(params, state)."
            )
    stored = jax.eval_shape(init_as_stored, jax.random.key(config.seed))
    return init_as_stored, stored.params, stored.state


def make_optimizer(config: Config, task: Task) -> optax.GradientTransformationExtraArgs:
    """Returns the config's optimizer, or else the task's, behind the clipping of the true global norm.

    Raises:
        ConfigError: neither has one, or a learning rate has nowhere to go.
    """
    optimizer = call_user(lambda: choose_optimizer(config, task.optimizer), "Task.optimizer")
    if config.clip_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
    return optax.with_extra_args_support(optimizer)
