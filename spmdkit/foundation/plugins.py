"""Things found by name: a folder of the package, a file for each kind, and in it `make(**options)`.

`communication/reducers/` and `communication/sync/` are such folders. `base.py` in each holds the interface as types.
Nothing is imported before it is asked for.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest

PACKAGE = Path(__file__).parents[1]
FOLDERS = {
    "reducers": "communication/reducers",
    "sync": "communication/sync",
    "preemption_sources": "faults/preemption_sources",
}
"""Group -> its folder in the package; any other group is its folder's path."""

OF_ALL = {"reducers": ("warmup",)}
"""Folder -> options that each of its kinds takes, a user's own too: numbers of steps, set in what was made."""


SHARED = {"base", "coded"}
"""Files of such a folder that are no kinds: the interface, and what several kinds share."""


def names(folder: str) -> list[str]:
    """Returns the names of the kinds in `folder`, without importing any."""
    return sorted(
        module.name for module in pkgutil.iter_modules([str(PACKAGE / _path(folder))]) if module.name not in SHARED
    )


def split(choice: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns (name, options) of `sum` or `{local_sgd: {every: 16}}`; of `{stale: 2}` the number, which `make` gives
    its name."""
    if isinstance(choice, str):
        return choice, {}
    name, options = next(iter(choice.items()))
    return name, {} if options is None else options


def is_own(choice: str | Mapping[str, Any]) -> bool:
    """Returns whether a choice names a user's own function: `file.py:name` or `module:name`."""
    return ":" in split(choice)[0]


def without_common(folder: str, choice: str | Mapping[str, Any]) -> tuple[str | dict[str, Any], dict[str, Any]]:
    """Returns (the choice without the options that all kinds of the folder take, those options)."""
    name, options = split(choice)
    if not isinstance(options, dict):
        return {name: options}, {}
    common = {key: options[key] for key in OF_ALL.get(folder, ()) if key in options}
    own = {key: value for key, value in options.items() if key not in common}
    return {name: own} if own else name, common


def common_problem(folder: str, choice: str | Mapping[str, Any]) -> str | None:
    """Returns what is wrong with the options that all kinds of the folder take, or None."""
    for key, value in without_common(folder, choice)[1].items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            return (
                f"{split(choice)[0]}.{key} is {reprlib.repr(value)}. It is a number of steps, from 0 on. Write "
                f"{key}: 100."
            )
    return None


def problem(folder: str, choice: str | Mapping[str, Any]) -> str | None:
    """Returns what is wrong with a choice and its options, or None."""
    choice, _ = without_common(folder, choice)
    name, options = split(choice)
    options = _by_name(folder, name, options)
    if name not in names(folder):
        return (
            f"needs one of {', '.join(names(folder))}, found {reprlib.repr(name)} (text).{nearest(name, names(folder))}"
        )
    if wrong := options_problem(name, options):
        return wrong
    signature = inspect.signature(_make_of(folder, name))
    known = list(signature.parameters)
    for option in options:
        if not known:
            return f"{name} takes no options, found {reprlib.repr(options)}. Write {name} alone."
        if option not in known:
            return f"{name} has no option {option!r}.{nearest(str(option), known)} Known are {', '.join(known)}."
    missing = [p.name for p in signature.parameters.values() if p.default is p.empty and p.name not in options]
    if missing:
        return f"{name} needs {', '.join(missing)}. Write {{{name}: {{{missing[0]}: VALUE}}}}."
    try:
        _make_of(folder, name)(**options)
    except ConfigError as error:
        return str(error)
    return None


def _by_name(folder: str, name: str, options: Any) -> Any:
    """Returns the options of `{stale: 2}`, a number for the only option that there is, under its name; any others as
    they are."""
    if isinstance(options, bool) or not isinstance(options, int | float) or name not in names(folder):
        return options
    only = list(inspect.signature(_make_of(folder, name)).parameters)
    return {only[0]: options} if len(only) == 1 else options


def has_option(folder: str, choice: str | Mapping[str, Any], option: str) -> bool:
    """Returns whether a kind of the package takes an option."""
    name, _ = split(choice)
    return not is_own(choice) and option in inspect.signature(_make_of(folder, name)).parameters


def options_problem(name: str, options: Any) -> str | None:
    """Returns what is wrong with what stands behind a name, or None."""
    if isinstance(options, dict):
        return None
    return f"{name}: options are a mapping, found {reprlib.repr(options)}. Write {{{name}: {{OPTION: VALUE}}}}."


def make(folder: str, choice: str | Mapping[str, Any]) -> Any:
    """Returns what `make` of the chosen kind returns.

    Raises:
        ConfigError: there is no such kind, or the options are not its.
    """
    if found := problem(folder, choice) or common_problem(folder, choice):
        raise ConfigError(f"{folder}: {found}")
    choice, common = without_common(folder, choice)
    name, options = split(choice)
    made = _make_of(folder, name)(**_by_name(folder, name, options))
    return dataclasses.replace(made, **common) if common else made


def options(folder: str, choice: str | Mapping[str, Any]) -> list[str]:
    """Returns the names of the options that a kind of the package takes."""
    return list(inspect.signature(_make_of(folder, split(choice)[0])).parameters)


def _make_of(folder: str, name: str) -> Any:
    return importlib.import_module(f"spmdkit.{_path(folder).replace('/', '.')}.{name}").make


def _path(folder: str) -> str:
    return FOLDERS.get(folder, folder)
