"""optax optimizers and learning-rate schedules by name: bound to optax's signatures, built, and tested on shapes.

A config can name only optax's public functions: optimizers have a learning rate, schedules return one. optax validates
the arguments: one step of an optimizer on two small arrays is traced, without running it or using a device. optax is
imported only when a config names one of its functions.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spmdkit.config.problems import KeyPath, Origin, Problem, render, show
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest

NOT_FROM_CONFIG = {
    "noisy_sgd": "it draws noise from its own key",
    "optimistic_adam": "optax has replaced it by optimistic_adam_v2",
}
"""optax optimizers that a config cannot name, with the reason."""

Check = Iterator[Problem]


@functools.cache
def optimizers() -> dict[str, Callable[..., Any]]:
    """Returns the optax functions that `optimizer.name` can name."""
    return {
        name: function
        for name, function in _public_functions()
        if "learning_rate" in inspect.signature(function).parameters
        and not name.startswith("scale_by_")
        and name not in NOT_FROM_CONFIG
    }


@functools.cache
def schedules() -> dict[str, Callable[..., Any]]:
    """Returns the optax functions that `learning_rate.name` can name."""
    import optax

    return {
        name: function
        for name, function in _public_functions()
        if inspect.signature(function).return_annotation == optax.Schedule and name != "join_schedules"
    }


def _public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    import optax

    for name in sorted(vars(optax)):
        if not name.startswith("_") and inspect.isfunction(getattr(optax, name)):
            yield name, getattr(optax, name)


def build_schedule(value: Any) -> Any:
    """Returns the learning rate of a config: None, a float, or the optax schedule of a mapping.

    Raises:
        ConfigError: optax has no such name or argument.
    """
    if not isinstance(value, Mapping):
        return value
    _raise(list(schedule_problems(value, ("learning_rate",))))
    return _schedule(value["name"])(**_arguments(value))


def build_optimizer(optimizer: Mapping[str, Any], learning_rate: Any = None) -> Any:
    """Returns the optax.GradientTransformation of `config.optimizer`.

    Args:
        optimizer: `{name: adamw, b2: 0.95, ...}`.
        learning_rate: `config.learning_rate`, or the result of `build_schedule`; None: that of the mapping.
    """
    _raise(list(optimizer_problems(optimizer, learning_rate is not None)))
    return _build_optimizer(optimizer, learning_rate)


def choose_optimizer(
    optimizer: Mapping[str, Any] | None, learning_rate: Any, task_optimizer: Any, where: Callable[[str], str]
) -> Any:
    """Returns the config's optimizer, or the task's: a transformation, or a function of the learning rate.

    Args:
        optimizer, learning_rate: the values in the config.
        task_optimizer: the optimizer of the task.
        where: returns the start of a message about a key.

    Raises:
        ConfigError: there is no optimizer, or `learning_rate` has no effect or is missing.
    """
    if optimizer is not None:
        return build_optimizer(optimizer, learning_rate)
    rate = build_schedule(learning_rate)
    if task_optimizer is None:
        raise ConfigError(
            f"{where('optimizer')}: is null, and the task has no optimizer. Training needs one. "
            "Try optimizer: {name: adamw, learning_rate: 1e-3}."
        )
    if hasattr(task_optimizer, "update"):
        if rate is not None:
            raise ConfigError(
                f"{where('learning_rate')}: is given, and the task's optimizer is complete, so it has no effect. "
                "Remove it, or give the task a function of it: Task(optimizer=lambda rate: optax.adamw(rate))."
            )
        return task_optimizer
    if not callable(task_optimizer):
        raise ConfigError(
            "Task.optimizer needs an optax optimizer or a function of the learning rate, "
            f"found {show(task_optimizer)}. Try Task(optimizer=optax.adamw(1e-3))."
        )
    takes = inspect.signature(task_optimizer).parameters.values()
    if rate is None and any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in takes
    ):
        raise ConfigError(
            f"{where('learning_rate')}: is null, and the task's optimizer is a function of it. Try learning_rate: 1e-3."
        )
    built = task_optimizer() if rate is None else task_optimizer(rate)
    if not hasattr(built, "update"):
        raise ConfigError(
            f"Task.optimizer returned {show(built)}. It returns an optax transformation. Return optax.adamw(...)."
        )
    return built


def _build_optimizer(optimizer: Mapping[str, Any], learning_rate: Any) -> Any:
    arguments = _arguments(optimizer)
    own_rate = arguments.pop("learning_rate", None)
    rate = build_schedule(own_rate if learning_rate is None else learning_rate)
    keywords = {} if rate is None else {"learning_rate": rate}
    return optimizers()[optimizer["name"]](**keywords, **arguments)


def _raise(found: list[Problem]) -> None:
    if found:
        raise ConfigError(render(found, Origin()))


def schedule_problems(value: Mapping[str, Any], path: KeyPath) -> Check:
    """Yields the problems of `{name: <schedule>, ...}`."""
    name = value.get("name")
    example = "{name: warmup_cosine_decay_schedule, ...}"
    if not isinstance(name, str) or _schedule(name) is None:
        yield _bad_name(name, (*path, "name"), sorted(schedules()), "schedule", example)
        return
    function = _schedule(name)
    arguments = _arguments(value)
    yield from list(_bind(function, arguments, path)) or _try(
        lambda: function(**arguments), function.__name__, path, arguments
    )


def _schedule(name: str) -> Any:
    return schedules().get(name) or schedules().get(f"{name}_schedule")


def optimizer_problems(value: Mapping[str, Any], has_learning_rate: bool) -> Check:
    """Yields the problems of `{name: <optimizer>, ...}`. `has_learning_rate`: whether the key learning_rate is set."""
    path: KeyPath = ("optimizer",)
    name = value.get("name")
    if isinstance(name, str) and name in NOT_FROM_CONFIG:
        yield Problem((*path, "name"), f"optax.{name} cannot be named in a config: {NOT_FROM_CONFIG[name]}. {_IN_TASK}")
        return
    if not isinstance(name, str) or name not in optimizers():
        yield _bad_name(name, (*path, "name"), sorted(optimizers()), "optimizer", "{name: adamw}")
        return
    function = optimizers()[name]
    arguments = _arguments(value)
    rate = arguments.pop("learning_rate", None)
    found = list(_bind(function, arguments, path, without=("learning_rate",)))
    parameter = inspect.signature(function).parameters["learning_rate"]
    if isinstance(rate, dict) and "Callable" in str(parameter.annotation):
        found += schedule_problems(rate, (*path, "learning_rate"))
    elif rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1e30):
        found.append(Problem((*path, "learning_rate"), f"needs a number of at least 0, found {show(rate)}. Try 1e-3."))
    elif rate is None and not has_learning_rate and parameter.default is inspect.Parameter.empty:
        found.append(Problem(path, f"optax.{name} needs a learning rate, found none. Try learning_rate: 1e-3."))
    stand_in = 1e-3 if rate is None and has_learning_rate else None
    yield from found or _try(lambda: _build_optimizer(value, stand_in), name, path, _arguments(value))


_IN_TASK = "Any other can be made in the task: Task(optimizer=...)."


def _bad_name(name: Any, path: KeyPath, known: list[str], what: str, example: str) -> Problem:
    if name is None:
        return Problem(path[:-1], f"needs the name of an optax {what}, found no key name. Try {example}.")
    hint = nearest(name, known) if isinstance(name, str) else ""
    return Problem(path, f"needs an optax {what}, found {show(name)}.{hint} Known are {', '.join(known)}. {_IN_TASK}")


def _arguments(value: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in value.items() if k != "name"}


def _bind(
    function: Callable[..., Any], arguments: Mapping[Any, Any], path: KeyPath, without: tuple[str, ...] = ()
) -> Check:
    """Yields the problems of unknown arguments, and of the first missing argument."""
    signature = inspect.signature(function)
    parameters = {n: p for n, p in signature.parameters.items() if n not in without}
    unknown = [key for key in arguments if key not in parameters]
    for key in unknown:
        yield Problem(
            (*path, str(key)),
            f"unknown argument of optax.{function.__name__}.{nearest(str(key), parameters)} "
            f"Its arguments are {', '.join(parameters)}.",
        )
    for key, value in arguments.items():
        if key in parameters and "mask" in key and not isinstance(value, bool | None):  # optax accepts any text as true
            yield Problem((*path, key), f"is a function or a tree, found {show(value)}. Leave it out. {_IN_TASK}")
    try:
        accepted = {key: value for key, value in arguments.items() if key not in unknown}
        signature.replace(parameters=list(parameters.values())).bind(**accepted)
    except TypeError as error:
        lacks = re.findall(r"'(\w+)'", str(error))
        yield Problem(path, f"optax.{function.__name__}: {error}, found none. Add {''.join(lacks[:1])}: ...")


_passed: set[str] = set()
"""Optimizers and schedules that have passed. A config is validated at every change, and each test is a trace."""


def _try(build: Callable[[], Any], what: str, path: KeyPath, arguments: Mapping[str, Any]) -> Check:
    """Yields optax's errors about values, raised by the constructor or the trace of a step."""
    key = f"{what} {arguments!r}"
    if key in _passed:
        return
    try:
        built = build()
        _trace_step(built) if hasattr(built, "update") else _trace_schedule(built)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        yield Problem(
            path, f"optax.{what} refuses its arguments, found {show(dict(arguments))}: {reason}. Change them."
        )
        return
    _passed.add(key)


def _trace_step(transformation: Any) -> None:
    """Traces `init` and `update` of two small arrays."""
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.with_extra_args_support(transformation)

    def value_fn(params: Any) -> Any:
        return sum((x**2).sum() for x in jax.tree.leaves(params))

    def step(params: Any) -> Any:
        return tx.update(params, tx.init(params), params, value=value_fn(params), grad=params, value_fn=value_fn)

    jax.eval_shape(step, {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.float32)})


def _trace_schedule(schedule: Callable[[Any], Any]) -> None:
    import jax
    import jax.numpy as jnp

    jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
