"""optax optimizers and learning-rate schedules by name: bound to optax's signatures, built, and tested on shapes.

A config can name only optax's public functions and those of schedules.py: optimizers have a learning rate, schedules
return one. optax validates the arguments: one step of an optimizer on two small arrays is traced, without running it
or using a device. optax is imported only when a config names one of its functions. Two arguments are added: `offset` of
a schedule (it starts at that step), and `add_decayed_weights` of an optimizer (an L2 penalty: that multiple of the
parameters is added to the gradient).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spmdkit.config.problems import KeyPath, Origin, Problem, render, show
from spmdkit.config.schedules import log_warmup_schedule, power_schedule
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
    """Returns the functions that `learning_rate.name` can name."""
    import optax

    of_optax = {
        name: function
        for name, function in _public_functions()
        if inspect.signature(function).return_annotation == optax.Schedule
    }
    return of_optax | {"log_warmup_schedule": log_warmup_schedule, "power_schedule": power_schedule}


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
    return _build_schedule(value)


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


def _build_schedule(value: Any) -> Any:
    import optax

    if not isinstance(value, Mapping):
        return optax.constant_schedule(value)
    arguments = _arguments(value)
    offset = arguments.pop("offset", 0)
    if "schedules" in arguments:
        arguments["schedules"] = [_build_schedule(part) for part in arguments["schedules"]]
    schedule = _schedule(value["name"])(**arguments)
    return (lambda step: schedule(step + offset)) if offset else schedule


def _build_optimizer(optimizer: Mapping[str, Any], learning_rate: Any) -> Any:
    import optax

    arguments = _arguments(optimizer)
    own_rate, penalty = arguments.pop("learning_rate", None), arguments.pop("add_decayed_weights", None)
    rate = build_schedule(own_rate if learning_rate is None else learning_rate)
    keywords = {} if rate is None else {"learning_rate": rate}
    built = optimizers()[optimizer["name"]](**keywords, **arguments)
    return built if penalty is None else optax.chain(optax.add_decayed_weights(penalty), built)


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
    offset = arguments.pop("offset", 0)
    if isinstance(offset, bool) or not isinstance(offset, int):
        yield Problem((*path, "offset"), f"needs a whole number of steps, found {show(offset)}. Try 100.")
        return
    found = list(_bind(function, arguments, path))
    if not found and "schedules" in arguments:
        found = list(_join_problems(arguments["schedules"], arguments["boundaries"], path))
    yield from found or _try(lambda: _build_schedule(value), _label(function), path, _arguments(value))


def _join_problems(schedules: Any, boundaries: Any, path: KeyPath) -> Check:
    """Yields the problems of `schedules` and `boundaries` of join_schedules; optax ignores those that have no pair."""
    if not isinstance(schedules, list) or not schedules:
        example = "[{name: linear, ...}, 1e-4]"
        yield Problem((*path, "schedules"), f"needs a list of schedules, found {show(schedules)}. Try {example}.")
        return
    for i, part in enumerate(schedules):
        if isinstance(part, Mapping):
            yield from schedule_problems(part, (*path, "schedules", i))
        elif isinstance(part, bool) or not isinstance(part, int | float):
            yield Problem((*path, "schedules", i), f"needs a schedule or a number, found {show(part)}. Try 1e-4.")
    steps = boundaries if isinstance(boundaries, list) else [None]
    is_rising = all(isinstance(b, int) and not isinstance(b, bool) and b > 0 for b in steps) and all(
        a < b for a, b in itertools.pairwise(steps)
    )
    if not is_rising or len(steps) != len(schedules) - 1:
        yield Problem(
            (*path, "boundaries"),
            f"needs rising steps at which the next of {len(schedules)} schedules begins, {len(schedules) - 1}, found "
            f"{show(boundaries)}. Try {[100 * (i + 1) for i in range(len(schedules) - 1)]}.",
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
    rate, penalty = arguments.pop("learning_rate", None), arguments.pop("add_decayed_weights", None)
    found = list(_bind(function, arguments, path, without=("learning_rate",)))
    parameter = inspect.signature(function).parameters["learning_rate"]
    if isinstance(rate, dict) and "Callable" in str(parameter.annotation):
        found += schedule_problems(rate, (*path, "learning_rate"))
    elif rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1e30):
        found.append(Problem((*path, "learning_rate"), f"needs a number of at least 0, found {show(rate)}. Try 1e-3."))
    if penalty is not None and (isinstance(penalty, bool) or not isinstance(penalty, int | float) or penalty < 0):
        needs = f"needs a number of at least 0, found {show(penalty)}. Try 1e-4."
        found.append(Problem((*path, "add_decayed_weights"), needs))
    if rate is None and not has_learning_rate and parameter.default is inspect.Parameter.empty:
        found.append(Problem(path, f"optax.{name} needs a learning rate, found none. Try learning_rate: 1e-3."))
    stand_in = 1e-3 if rate is None and has_learning_rate else None
    yield from found or _try(lambda: _build_optimizer(value, stand_in), _label(function), path, _arguments(value))


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
            f"unknown argument of {_label(function)}.{nearest(str(key), parameters)} "
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
        yield Problem(path, f"{_label(function)}: {error}, found none. Add {''.join(lacks[:1])}: ...")


def _label(function: Callable[..., Any]) -> str:
    """Returns the name of a function in a message, with `optax.` if it is from there."""
    return f"{'optax.' * function.__module__.startswith('optax')}{function.__name__}"


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
        yield Problem(path, f"{what} refuses its arguments, found {show(dict(arguments))}: {reason}. Change them.")
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
