"""Where the records of a run go: a file each, found by its name. `chosen` says which, `Sinks` writes to all of them.

metrics.jsonl is always written: the run's own record. Others are named by `log.sinks`: a file here, or a user's own
under `@sk.sink`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spmdkit.errors import ConfigError
from spmdkit.foundation import user_code
from spmdkit.foundation.formatting import nearest
from spmdkit.metrics.sinks.base import Sink
from spmdkit.metrics.sinks.queue import Sinks

__all__ = ["ChosenSink", "Sink", "Sinks", "chosen", "names"]

ALWAYS = "jsonl"


class ChosenSink(NamedTuple):
    """A sink that a config names: its name, how it is opened, and its options."""

    name: str
    open: Callable[[Any, Mapping[str, Any], int], Sink]
    options: Mapping[str, Any]


def names() -> list[str]:
    """Returns the names of the sinks that come with the package."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in ("base", "queue"))


def chosen(asked: Sequence[str | Mapping[str, Any]], folder: Path) -> list[ChosenSink]:
    """Returns the sinks of a run: its own record, and those that a config names, each by a name or as `{name:
    options}`.

    Raises:
        ConfigError: no such sink.
    """
    found = [ChosenSink(ALWAYS, _opener(ALWAYS, folder), {})]
    for entry in asked:
        name, options = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
        if any(name == other.name for other in found):
            raise ConfigError(f"log.sinks: {name} is written to already. A sink is named once. Remove it.")
        found.append(ChosenSink(name, _opener(name, folder), options or {}))
    return found


def _opener(name: str, folder: Path) -> Any:
    if ":" in name:
        return user_code.find(name, "sink", folder)
    if name not in names():
        raise ConfigError(
            f"log.sinks: '{name}' is not known. Valid: {', '.join(names())}, or a function of yours under @sk.sink, as my_sink.py:open."
            f"{nearest(name, names())}"
        )
    return importlib.import_module(f"{__name__}.{name}").open
