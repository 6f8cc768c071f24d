"""The parameters that a config trains, and its optimizer for groups of them: `train_only`, `groups`, `Task.frozen`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from spmdkit.config import Config
from spmdkit.config.optimizer import build_schedule, choose_optimizer, optimizers
from spmdkit.config.sections import ParameterGroup
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import named_leaves, path_name
from spmdkit.ops import float8
from spmdkit.program.task import Task
from spmdkit.step.leaf_roles import Declared, Roles


def declared(config: Config, task: Task) -> Declared:
    """Returns the patterns of a task and its config that give parameters a role."""
    of_task = (("Task.frozen", pattern, True) for pattern in task.frozen)
    of_config = ((f"groups.{i}", group.match, group.frozen) for i, group in enumerate(config.groups))
    histories = [float8.PATTERN] if config.precision.matmul == "float8" else []
    return Declared((*of_task, *of_config), (*task.overwritten, *histories), tuple(config.train_only or ()))


def where(config: Config, source: str) -> str:
    """Returns the position of a source of `declared`."""
    return source if source.startswith("Task.") else config.where(source)


def notes(config: Config, roles: Roles, params: Any) -> dict[str, str]:
    """Returns path -> the role or the settings of the groups, for parameters that have one."""
    texts: Callable[[str], str] = lambda path: roles.get(
        path, ", ".join(f"{key} {value:g}" for key, value in changes_of(config, path).items())
    )
    return {path: text for path, _ in named_leaves(params) if (text := texts(path))}


def _groups_of(config: Config, path: str) -> list[tuple[int, ParameterGroup]]:
    """Returns the groups that change the optimizer of a parameter, with their numbers."""
    return [(i, group) for i, group in enumerate(config.groups) if group.changes and re.fullmatch(group.match, path)]


def changes_of(config: Config, path: str) -> Mapping[str, float]:
    """Returns the settings of the groups of a parameter.

    Raises:
        ConfigError: two groups set one key to different values.
    """
    changes = dict[str, float]()
    for _, group in _groups_of(config, path):
        for key, value in group.changes.items():
            if changes.setdefault(key, value) != value:
                raise ConfigError(
                    f"{config.where('groups')}: parameter '{path}' has {key}: {changes[key]:g} and {key}: {value:g} of "
                    "two groups. Each key has one value. Change a pattern."
                )
    return changes


def choose(config: Config, task: Task) -> optax.GradientTransformation:
    """Returns the optimizer of a config, or else of its task; with groups, one for each set of their settings.

    Raises:
        ConfigError: a group sets the learning rate of an optimizer without one in the config.
    """
    if not any(group.changes for group in config.groups):
        return _changed(config, task, {})
    if config.optimizer is None and hasattr(task.optimizer, "update"):
        raise ConfigError(
            f"{config.where('groups')}: learning_rate_scale needs a learning rate, and the task's optimizer is "
            "complete. Pass a function of it: Task(optimizer=lambda rate: optax.adamw(rate))."
        )

    def partitioned(tree: Any) -> optax.GradientTransformationExtraArgs:
        changes = dict[str, Mapping[str, float]]()

        def label(path: Any, _: Any) -> str:
            numbers = [str(i) for i, group in _groups_of(config, path_name(path))]
            name = "_".join(["group", *numbers]) if numbers else "default"
            changes[name] = changes_of(config, path_name(path))
            return name

        labels = jax.tree.map_with_path(label, tree)
        transforms = {name: _changed(config, task, changes[name]) for name in sorted(changes)}
        return optax.partition(transforms, labels, mask_compatible_extra_args=True)

    update: Callable[..., Any] = lambda grads, *args, **extra: partitioned(grads).update(grads, *args, **extra)
    return optax.GradientTransformationExtraArgs(lambda params: partitioned(params).init(params), update)


def _changed(config: Config, task: Task, changes: Mapping[str, float]) -> Any:
    """Returns the optimizer with another weight decay and a scaled learning rate."""
    optimizer, rate = config.optimizer, config.learning_rate
    if optimizer is not None and (decay := changes.get("weight_decay")) is not None:
        has_key = "weight_decay" in inspect.signature(optimizers()[optimizer["name"]]).parameters
        optimizer = {**optimizer, "weight_decay" if has_key else "add_decayed_weights": decay}
    if (scale := changes.get("learning_rate_scale")) is not None:
        rate = _scaled(optimizer["learning_rate"] if optimizer is not None and rate is None else rate, scale)
    return choose_optimizer(optimizer, rate, task.optimizer, config.where)


def _scaled(rate: Any, scale: float) -> Any:
    if isinstance(schedule := build_schedule(rate), float | int):
        return schedule * scale
    return None if schedule is None else lambda step: schedule(step) * scale
