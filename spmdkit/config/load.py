"""Loads a config from a file or a mapping, with the checks of schema.py and rules.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from spmdkit.config import inheritance
from spmdkit.config import overrides as override
from spmdkit.config.problems import KeyPath, Location, Origin, key_path, show
from spmdkit.config.schema import Config
from spmdkit.errors import ConfigError
from spmdkit.foundation import redact


def load_config(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Config:
    """Returns the checked config of a YAML, JSON or TOML file and its `base`, with `key=value` overrides applied.

    Raises:
        ConfigError: the config is invalid; one message lists all problems with file and line.
    """
    name = os.fspath(path)
    file = Path(os.path.abspath(name))
    document = override.apply(inheritance.read(file, name), overrides)
    return parse_config(document.value, file, document.places, name, document.references)


def parse_config(
    mapping: Mapping[str, Any],
    source: str | os.PathLike[str] | None = None,
    positions: Mapping[KeyPath, Location] | None = None,
    name: str | None = None,
    references: Mapping[KeyPath, str] | None = None,
) -> Config:
    """Returns the checked config of plain values.

    Args:
        mapping: the keys of a config file.
        source: the file of these values; relative paths start at its folder. None: the current folder.
        positions: the position of each key, for messages.
        name: the file name in messages; default: `source`.
        references: the text of values with `${env:NAME}`, for the config.yaml of a run.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            f"a config needs a mapping of keys, found {show(mapping)}. Try {{'task': 'my_task.py:task'}}."
        )
    file = None if source is None else Path(os.path.abspath(source))
    shown = name if name is not None else "" if source is None else os.fspath(source)
    redact.register_secrets(mapping)
    return Config.model_validate(
        dict(mapping), context=Origin(file, shown, dict(positions or {}), dict(references or {}))
    )


def replace_keys(config: Config, changes: Mapping[str, Any]) -> Config:
    """Returns the config with dotted keys set to new values, validated again: `{"mesh": {"data": 4}, "ema": None}`."""
    values = config.model_dump()
    for key, other in (("steps", "epochs"), ("epochs", "steps")):  # the length of a run has one of them
        if changes.get(key) is not None:
            values[other] = None
    for key, new in changes.items():
        *parents, last = key.split(".")
        inner = values
        for part in parents:
            if inner.get(part) is None:
                inner[part] = {}
            inner = inner[part]
        inner[last] = new
    origin = config._origin
    changed = [key_path(key) for key in changes]
    is_kept: Callable[[KeyPath], bool] = lambda path: not any(path[: len(key)] == key for key in changed)
    places = {path: place for path, place in origin.places.items() if is_kept(path)}
    references = {path: text for path, text in origin.references.items() if is_kept(path)}
    return parse_config(values, origin.file, places, origin.name, references)
