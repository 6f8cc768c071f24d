"""optax optimizers and learning-rate schedules by name: checked against optax's own signatures, then built.

Only optax's public functions can be named: optimizers are those that take a learning rate, schedules those that return
one. Checking builds the object, which touches no device. optax is imported when a config names one of its functions.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from spmdkit.config.fields import INT32_MAX
from spmdkit.config.problems import KeyPath, Origin, Problem, render, show
from spmdkit.errors import ConfigError
from spmdkit.words import nearest

if TYPE_CHECKING:
    from spmdkit.config.schema import Config

NOT_FROM_CONFIG = {
    "noisy_sgd": "it draws noise from a key of its own",
    "optimistic_adam": "optax has replaced it by optimistic_adam_v2",
}
"""optax optimizers that a config cannot name, with the reason."""

Check = Iterator[Problem]


@functools.cache
def optimizers() -> dict[str, Callable[..., Any]]:
    """Returns the optax functions that `optimizer.name` may hold."""
    return {
        name: function
        for name, function in _public_functions()
        if "learning_rate" in inspect.signature(function).parameters
        and not name.startswith("scale_by_")
        and name not in NOT_FROM_CONFIG
    }


@functools.cache
def schedules() -> dict[str, Callable[..., Any]]:
    """Returns the optax functions that `learning_rate.name` may hold."""
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
    """Returns the learning rate of a config: None, a float, or the optax schedule that a mapping names.

    Raises:
        ConfigError: a name or argument that optax does not have.
    """
    if not isinstance(value, Mapping):
        return value
    _raise(list(schedule_problems(value, ("learning_rate",))))
    return _schedule(value["name"])(**_arguments(value))


def build_optimizer(optimizer: Mapping[str, Any], learning_rate: Any = None) -> Any:
    """Returns the optax.GradientTransformation of `config.optimizer`.

    Args:
        optimizer: `{name: adamw, b2: 0.95, ...}`.
        learning_rate: `config.learning_rate`, or what `build_schedule` made of it; None: the mapping's own.
    """
    _raise(list(optimizer_problems(optimizer, learning_rate is not None)))
    return _build_optimizer(optimizer, learning_rate)


def choose_optimizer(config: Config, task_optimizer: Any) -> Any:
    """Returns the optimizer of the config, else the task's: a transformation, or a function of the learning rate.

    Raises:
        ConfigError: there is none, or `learning_rate` has no effect or is missing.
    """
    if config.optimizer is not None:
        return build_optimizer(config.optimizer, config.learning_rate)
    where, rate = config.where("learning_rate"), build_schedule(config.learning_rate)
    if task_optimizer is None:
        raise ConfigError(
            f"{config.where('optimizer')}: is null, and the task has no optimizer. Training needs one. "
            "Try optimizer: {name: adamw, learning_rate: 1e-3}."
        )
    if hasattr(task_optimizer, "update"):
        if rate is not None:
            raise ConfigError(
                f"{where}: is given, and the task's optimizer is complete, so it has no effect. "
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
        raise ConfigError(f"{where}: is null, and the task's optimizer is a function of it. Try learning_rate: 1e-3.")
    built = task_optimizer() if rate is None else task_optimizer(rate)
    if not hasattr(built, "update"):
        raise ConfigError(
            f"Task.optimizer returned {show(built)}. It returns an optax transformation. Return optax.adamw(...)."
        )
    return built


def _build_optimizer(optimizer: Mapping[str, Any], learning_rate: Any) -> Any:
    arguments = _arguments(optimizer)
    own = arguments.pop("learning_rate", None)
    rate = build_schedule(own if learning_rate is None else learning_rate)
    given = {} if rate is None else {"learning_rate": rate}
    return optimizers()[optimizer["name"]](**given, **arguments)


def _raise(found: list[Problem]) -> None:
    if found:
        raise ConfigError(render(found, Origin()))


def schedule_problems(value: Mapping[str, Any], path: KeyPath) -> Check:
    """Yields what is wrong with `{name: <schedule>, ...}`."""
    name = value.get("name")
    example = "{name: warmup_cosine_decay_schedule, ...}"
    if not isinstance(name, str) or _schedule(name) is None:
        yield _bad_name(name, (*path, "name"), sorted(schedules()), "schedule", example)
        return
    function = _schedule(name)
    found = list(_argument_problems(function, _arguments(value), path))
    yield from found or _building(lambda: function(**_arguments(value)), f"optax.{function.__name__}", path)


def _schedule(name: str) -> Any:
    return schedules().get(name) or schedules().get(f"{name}_schedule")


def optimizer_problems(value: Mapping[str, Any], has_learning_rate: bool) -> Check:
    """Yields what is wrong with `{name: <optimizer>, ...}`; `has_learning_rate` when the key learning_rate is set."""
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
    found = list(_argument_problems(function, arguments, path, without=("learning_rate",)))
    parameter = inspect.signature(function).parameters["learning_rate"]
    if isinstance(rate, dict) and "Callable" in str(parameter.annotation):
        found += schedule_problems(rate, (*path, "learning_rate"))
    elif rate is not None and (isinstance(rate, bool) or not _is_number(rate) or rate < 0):
        found.append(Problem((*path, "learning_rate"), f"needs a number of at least 0, found {show(rate)}. Try 1e-3."))
    elif rate is None and not has_learning_rate and parameter.default is inspect.Parameter.empty:
        found.append(Problem(path, f"optax.{name} needs a learning rate, found none. Try learning_rate: 1e-3."))
    stand_in = 1e-3 if rate is None and has_learning_rate else None
    yield from found or _building(lambda: _build_optimizer(value, stand_in), f"optax.{name}", path)


_IN_TASK = "Any other can be made in the task: Task(optimizer=...)."


def _bad_name(name: Any, path: KeyPath, known: list[str], what: str, example: str) -> Problem:
    if name is None:
        return Problem(path[:-1], f"needs the name of an optax {what}, found no key name. Try {example}.")
    hint = nearest(name, known) if isinstance(name, str) else ""
    return Problem(path, f"needs an optax {what}, found {show(name)}.{hint} Known are {', '.join(known)}. {_IN_TASK}")


def _arguments(value: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in value.items() if k != "name"}


def _argument_problems(
    function: Callable[..., Any], arguments: Mapping[Any, Any], path: KeyPath, without: tuple[str, ...] = ()
) -> Check:
    """Yields arguments that the function does not have, lacks, or cannot take."""
    parameters = {n: p for n, p in inspect.signature(function).parameters.items() if n not in without}
    for key, value in arguments.items():
        if key not in parameters:
            yield Problem(
                (*path, str(key)),
                f"unknown argument of optax.{function.__name__}.{nearest(str(key), parameters)} "
                f"Its arguments are {', '.join(parameters)}.",
            )
        elif wants := _mismatch(parameters[key], value):
            yield Problem(
                (*path, key), f"needs {wants}, found {show(value)}. It is given to optax.{function.__name__}."
            )
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in arguments:
            yield Problem(path, f"optax.{function.__name__} needs {name}, found none. Add {name}: ...")


def _mismatch(parameter: inspect.Parameter, value: Any) -> str:
    """Returns what the parameter wants when `value` is something else, in words."""
    kind, text, default = parameter.annotation, str(parameter.annotation), parameter.default
    if value is None and (default is None or "None" in text):
        return ""
    if parameter.name.endswith("dtype") or parameter.name.startswith("dtype"):
        return "" if value in ("float32", "bfloat16", "float16") else "float32, bfloat16 or float16"
    if "GradientTransformation" in text or ("mask" in parameter.name and not isinstance(default, bool)):
        return "to be left out in a config (it is a function)"
    if kind is bool or isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if kind is str:
        return "" if isinstance(value, str) else "text"
    if "dict[int" in text:
        right = isinstance(value, dict) and all(type(k) is int and _is_number(v) for k, v in value.items())
        return "" if right else "a mapping of step to factor, for example {1000: 0.1}"
    if "dict[" in text:
        right = isinstance(value, list) and all(isinstance(v, dict) and all(map(_is_number, v.values())) for v in value)
        return "" if right and value else "a list of mappings of numbers"
    if kind is int:
        right = type(value) is int and 0 <= value <= INT32_MAX
        return "" if right else f"a whole number from 0 to {INT32_MAX}"
    return "" if _is_number(value) else "a finite number"


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and abs(value) < 1e30


def _building(build: Callable[[], Any], what: str, path: KeyPath) -> Check:
    """Yields optax's own complaint about values that are each of the right kind."""
    try:
        build()
    except (TypeError, ValueError, ArithmeticError, KeyError, IndexError, AttributeError) as error:
        yield Problem(path, f"{what} refuses these arguments: {str(error).strip().rstrip('.')}. Change them.")
