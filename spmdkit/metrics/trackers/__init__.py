"""Trackers: destinations of the records of a run. One file per kind; `base.py` specifies the interface.

Input: records of numbers by step, from the training thread. Output: metrics.jsonl, which is always written, and the
output of the trackers in `log.trackers`, written by one background thread of process 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins, user_code
from spmdkit.foundation.formatting import nearest
from spmdkit.metrics.trackers.base import Tracker
from spmdkit.metrics.trackers.queue import Trackers

__all__ = ["ChosenTracker", "Tracker", "Trackers", "chosen"]

ALWAYS = "jsonl"


class ChosenTracker(NamedTuple):
    """A tracker named in a config.

    Attributes:
        open: `(run, last_step) -> Tracker`, with the options of the config.
    """

    name: str
    open: Callable[[Any, int], Tracker]


def chosen(choices: Sequence[str | Mapping[str, Any]], folder: Path) -> list[ChosenTracker]:
    """Returns the trackers of a run: metrics.jsonl, and those of the config, each a name or `{name: options}`.

    Raises:
        ConfigError: no such tracker, it is named twice, or it does not accept the options.
    """
    trackers: list[ChosenTracker] = []
    for choice in (ALWAYS, *choices):
        name, options = plugins.split(choice)
        if any(name == other.name for other in trackers):
            raise ConfigError(
                f"log.trackers: {name} is named twice, or is always open. A tracker is opened once. Remove it."
            )
        factory = _factory(name, folder)
        if wrong := plugins.options_problem(name, options) or plugins.signature_problem(name, factory, options, 2):
            raise ConfigError(f"log.trackers: {wrong}")
        trackers.append(ChosenTracker(name, functools.partial(factory, **options)))
    return trackers


def _factory(name: str, folder: Path) -> Any:
    if plugins.is_reference(name):
        return user_code.find(name, "tracker", folder)
    trackers = plugins.find("trackers")
    if name not in trackers:
        raise ConfigError(
            f"log.trackers: needs one of {', '.join(trackers)}, or file.py:name of a function under @sk.tracker, "
            f"found {name!r}.{nearest(name, list(trackers))}"
        )
    return trackers[name]()
