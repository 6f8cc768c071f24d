"""Plug-ins: discovered by group and name in this package and other distributions, and created from a config.

A built-in plug-in is a module in the folder of its group. Its name in a config is the module's name. Another
distribution declares an entry point that names a module with the same contents, or the object in it:

    [project.entry-points."spmdkit.reducers"]
    my_reducer = "my_package.my_reducer"

Nothing is imported until a plug-in is used. `base.py` in each folder specifies the interface.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import pkgutil
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest

PACKAGE = Path(__file__).parents[1]

Choice = str | Mapping[str, Any]
"""The form of a plug-in in a config: `sum`, or `{local_sgd: {every: 16}}` with options."""


class Group(NamedTuple):
    """One kind of plug-in.

    Attributes:
        folder: the folder of the built-in modules; None: only other distributions have plug-ins of this group.
        attribute: the plug-in is this attribute of its module; None: the module itself.
        helpers: modules of the folder that are not plug-ins.
        common_options: options of every plug-in of the group: numbers of steps, fields of the created object.
    """

    folder: str | None
    attribute: str | None = "make"
    helpers: tuple[str, ...] = ("base",)
    common_options: tuple[str, ...] = ()


GROUPS = {
    "reducers": Group("communication/reducers", helpers=("base", "coded"), common_options=("warmup",)),
    "syncs": Group("communication/sync"),
    "default_hooks": Group("run/hooks"),
    "hooks": Group("run/common_hooks", helpers=("improvement",)),
    "trackers": Group("metrics/trackers", "open", helpers=("base", "queue", "service_run")),
    "environments": Group("cluster/environments", None),
    "preemption_sources": Group("faults/preemption_sources"),
    "data_sources": Group(None, "open_source"),
    "streams": Group("data/streams", "open_stream"),
    "engines": Group("launch/engines", None, helpers=("base", "pods", "submit")),
    "findings": Group("plan/findings", "find"),
    "migrations": Group("tools/migrate", None, helpers=("base", "command", "deepspeed_optimizer")),
}
"""Group -> its kind of plug-in. The entry points of a group are declared as `spmdkit.GROUP`.

`default_hooks` are created for every config, `make(config) -> Hook | None`. `hooks` are created if the config names
them, `make(**options) -> Hook`.
"""


def find(group: str) -> dict[str, Callable[[], Any]]:
    """Returns name -> a function that imports and returns the plug-in, sorted by name, for all plug-ins of a group.

    Raises:
        ConfigError: two plug-ins have the same name.
    """
    folder, attribute, helpers, _ = GROUPS[group]
    loaders: dict[str, Callable[[], Any]] = {}
    if folder is not None:
        package = f"spmdkit.{folder.replace('/', '.')}"
        for module in pkgutil.iter_modules([str(PACKAGE / folder)]):
            if module.name not in helpers:
                loaders[module.name] = functools.partial(_load_module, f"{package}.{module.name}", attribute)
    for entry in _entry_points()[group]:
        if entry.name in loaders:
            raise ConfigError(
                f"{entry.group}: {_distribution(entry)} declares '{entry.name}', which is the name of another plug-in. "
                "Names are unique in a group. Uninstall that distribution, or rename its entry point."
            )
        loaders[entry.name] = functools.partial(_load_entry_point, entry, attribute)
    return dict(sorted(loaders.items()))


def names(group: str) -> list[str]:
    """Returns the names of the plug-ins of a group without importing them."""
    return list(find(group))


def load_all(group: str) -> dict[str, Any]:
    """Returns name -> plug-in, for every plug-in of a group."""
    return {name: load() for name, load in find(group).items()}


@functools.cache
def _entry_points() -> dict[str, tuple[importlib.metadata.EntryPoint, ...]]:
    """Returns group -> its entry points. Cached, since it reads the metadata of every installed distribution."""
    installed = importlib.metadata.entry_points()
    return {group: tuple(installed.select(group=f"spmdkit.{group}")) for group in GROUPS}


def _load_module(module: str, attribute: str | None) -> Any:
    loaded = importlib.import_module(module)
    return loaded if attribute is None else getattr(loaded, attribute)


def _load_entry_point(entry: importlib.metadata.EntryPoint, attribute: str | None) -> Any:
    try:
        loaded = entry.load()
        return getattr(loaded, attribute) if isinstance(loaded, ModuleType) and attribute is not None else loaded
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{entry.group}: '{entry.name}' of {_distribution(entry)} cannot be loaded from {entry.value}: {error}. "
            "Update or uninstall that distribution."
        ) from error


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "a distribution"


# ---- choices of a config ---------------------------------------------------------------------------------------------


def split(choice: Choice) -> tuple[str, dict[str, Any]]:
    """Returns (name, options). The options of `{stale: 2}` are the number; `make` resolves the option's name."""
    if isinstance(choice, str):
        return choice, {}
    name, options = next(iter(choice.items()))
    return name, {} if options is None else options


def is_reference(choice: Choice) -> bool:
    """Returns whether a choice refers to a user-defined function: `file.py:name` or `module:name`."""
    return ":" in split(choice)[0]


def split_common_options(group: str, choice: Choice) -> tuple[str | dict[str, Any], dict[str, Any]]:
    """Returns (the choice without the common options of the group, the common options)."""
    name, options = split(choice)
    if not isinstance(options, dict):
        return {name: options}, {}
    common = {key: options[key] for key in GROUPS[group].common_options if key in options}
    others = {key: value for key, value in options.items() if key not in common}
    return {name: others} if others else name, common


def problem(group: str, choice: Choice) -> str | None:
    """Returns the problem of a choice and its options, or None."""
    name, options = split(split_common_options(group, choice)[0])
    if is_reference(choice):
        return options_problem(name, options) or _common_options_problem(group, choice)
    plugins = find(group)
    if name not in plugins:
        known = f"one of {', '.join(plugins)}" if plugins else f"file.py:name: no installed distribution has {group}"
        return f"needs {known}, found {reprlib.repr(name)} (text).{nearest(name, list(plugins))}"
    factory = plugins[name]()
    options = _name_only_option(factory, options)
    if wrong := options_problem(name, options) or signature_problem(name, factory, options):
        return wrong
    try:
        factory(**options)
    except ConfigError as error:
        return str(error)
    return _common_options_problem(group, choice)


def options_problem(name: str, options: Any) -> str | None:
    """Returns the problem of the type of options, or None."""
    if isinstance(options, dict):
        return None
    return f"{name}: options are a mapping, found {reprlib.repr(options)}. Write {{{name}: {{OPTION: VALUE}}}}."


def signature_problem(name: str, factory: Any, options: Mapping[str, Any], num_arguments: int = 0) -> str | None:
    """Returns the problem of options that are passed to `factory` by keyword, or None.

    Args:
        num_arguments: number of positional arguments that `factory` receives before the options.
    """
    parameters = list(inspect.signature(factory).parameters.values())[num_arguments:]
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for option in () if any(p.kind is p.VAR_KEYWORD for p in parameters) else options:
        if not known:
            return f"{name} takes no options, found {reprlib.repr(options)}. Write {name} alone."
        if option not in known:
            return f"{name} has no option {option!r}.{nearest(str(option), known)} Known are {', '.join(known)}."
    missing = [p.name for p in parameters if p.name in known and p.default is p.empty and p.name not in options]
    if missing:
        return f"{name} needs {', '.join(missing)}. Write {{{name}: {{{missing[0]}: VALUE}}}}."
    return None


def _common_options_problem(group: str, choice: Choice) -> str | None:
    for key, value in split_common_options(group, choice)[1].items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            found = f"{split(choice)[0]}.{key} is {reprlib.repr(value)}"
            return f"{found}. It is a number of steps, from 0 on. Write {key}: 100."
    return None


def _name_only_option(factory: Any, options: Any) -> Any:
    """Returns `{option: 2}` for the number 2 if the plug-in has one option; other options are unchanged."""
    if isinstance(options, bool) or not isinstance(options, int | float):
        return options
    parameters = list(inspect.signature(factory).parameters)
    return {parameters[0]: options} if len(parameters) == 1 else options


def options(group: str, choice: Choice) -> list[str]:
    """Returns the names of the options that a plug-in accepts; none for a user-defined function."""
    return [] if is_reference(choice) else list(inspect.signature(find(group)[split(choice)[0]]()).parameters)


def make(group: str, choice: Choice) -> Any:
    """Returns the object that the chosen plug-in creates from its options.

    Raises:
        ConfigError: no such plug-in, or it does not accept the options.
    """
    if wrong := problem(group, choice):
        raise ConfigError(f"{group}: {wrong}")
    choice, common = split_common_options(group, choice)
    name, options = split(choice)
    factory = find(group)[name]()
    plugin = factory(**_name_only_option(factory, options))
    return dataclasses.replace(plugin, **common) if common else plugin
