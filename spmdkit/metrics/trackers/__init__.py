"""Where the records of a run go: a file each, found by its name. `chosen` says which, `Trackers` writes to all of them.

metrics.jsonl is always written: the run's own record. Others are named by `log.trackers`: a file here, or a user's own
under `@sk.tracker`.
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
from spmdkit.metrics.trackers.base import Tracker
from spmdkit.metrics.trackers.queue import Trackers

__all__ = ["ChosenTracker", "Tracker", "Trackers", "chosen", "names"]

ALWAYS = "jsonl"


class ChosenTracker(NamedTuple):
    """A tracker that a config names: its name, how it is opened, and its options."""

    name: str
    open: Callable[[Any, Mapping[str, Any], int], Tracker]
    options: Mapping[str, Any]


def names() -> list[str]:
    """Returns the names of the trackers that come with the package."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in ("base", "queue"))


def chosen(asked: Sequence[str | Mapping[str, Any]], folder: Path) -> list[ChosenTracker]:
    """Returns the trackers of a run: its own record, and those that a config names, each by a name or as `{name:
    options}`.

    Raises:
        ConfigError: no such tracker.
    """
    found = [ChosenTracker(ALWAYS, _opener(ALWAYS, folder), {})]
    for entry in asked:
        name, options = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
        if any(name == other.name for other in found):
            raise ConfigError(f"log.trackers: {name} is written to already. A tracker is named once. Remove it.")
        found.append(ChosenTracker(name, _opener(name, folder), options or {}))
    return found


def _opener(name: str, folder: Path) -> Any:
    if ":" in name:
        return user_code.find(name, "tracker", folder)
    if name not in names():
        raise ConfigError(
            f"log.trackers: '{name}' is not known. Valid: {', '.join(names())}, or a function of yours under @sk.tracker, as my_tracker.py:open."
            f"{nearest(name, names())}"
        )
    return importlib.import_module(f"{__name__}.{name}").open
