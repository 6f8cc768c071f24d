"""Applies `key=value` arguments of the command line to the values of a config file: dotted keys, values in YAML."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from spmdkit.config import source
from spmdkit.config.problems import KeyPath, Location, dotted, key_path, show
from spmdkit.errors import ConfigError


def apply(document: source.Document, overrides: Iterable[str]) -> source.Document:
    """Returns the document with each `key=value` set. Later overrides win, and messages name the override.

    Missing or null mappings on the path are created. The value is YAML: `mesh='{data: 4}'`, `eval.params=ema`.

    Raises:
        ConfigError: no `=`, an empty key, a value that is not YAML, or a key inside a value that is not a mapping.
    """
    value, places, references = copy.deepcopy(document.value), dict(document.places), dict(document.references)
    for text in overrides:
        path, new = _parse(text)
        place = Location(f"override {_shown(text)}", 0)
        _set(value, path, new.value, place)
        for known in (places, references):
            for old in [p for p in known if p[: len(path)] == path]:
                del known[old]
        for end in range(1, len(path) + 1):
            places.setdefault(path[:end], place)
        places.update({(*path, *p): place for p in new.places})
        references.update({(*path, *p): reference for p, reference in new.references.items()})
    return source.Document(value, places, references)


def _parse(text: str) -> tuple[KeyPath, source.Document]:
    key, equals, raw = text.partition("=")
    where = f"override {_shown(text)}"
    if not equals:
        raise ConfigError(f"{where}: needs key=value, found no `=`. Write {key.strip() or 'steps'}=...")
    path = key_path(key.strip())
    if not all(isinstance(p, str) and p.strip() for p in path):
        raise ConfigError(f"{where}: needs a dotted key before `=`, found {key!r}. Write for example mesh.data=8.")
    parsed = source.parse(raw, lambda _line: Location(where, 0), where)
    if parsed.value is None and not raw.strip():
        raise ConfigError(f"{where}: {dotted(path)} has no value. Write one after `=`, or {key}=null.")
    return path, parsed


def _set(value: dict[Any, Any], path: KeyPath, new: Any, place: Location) -> None:
    for depth, part in enumerate(path[:-1], start=1):
        if value.get(part) is None:
            value[part] = {}
        inner = value[part]
        if not isinstance(inner, dict):
            holder, key = dotted(path[:depth]), dotted(path[depth:])
            raise ConfigError(
                f"{place.where}: {holder} is {show(inner)}, which has no key {key}. An override sets keys of mappings. "
                f"Give the whole value: {holder}='{{{key}: ...}}'."
            )
        value = inner
    value[path[-1]] = new


def _shown(text: str) -> str:
    short = text if len(text) <= 100 else f"{text[:97]}..."
    return short if short.isprintable() else repr(short)
