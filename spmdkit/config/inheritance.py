"""`base: ../base.yaml`: a config that has only the differences from another one, which may have a base as well.

Mappings are merged key by key; any other value replaces that of the base. A mapping that selects something by name
(`{name: adamw, ...}`, `{powersgd: {...}}`) replaces one with another name, since its options belong to the name.

A relative path has the meaning of the file that contains it: Python files (`task`, `hooks`, `reducer` ...), `init_from`
and the folders of `compile_cache`. `run_dir` is relative to the config that is run, and so is its default.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from spmdkit.config.problems import KeyPath, show
from spmdkit.config.source import Document, read_file
from spmdkit.errors import ConfigError

MAX_BASES = 8

_PYTHON = re.compile(r"[^:]+\.py:\w+")
_PATHS = {("init_from",), ("init_from", "path"), ("init_from", "file")}
_PATHS |= {("compile_cache", "directory"), ("compile_cache", "saved")}
_CHOICES = {("reducer",), ("sync",)}


def read(file: Path, name: str) -> Document:
    """Returns the values of a config file, merged with those of its base.

    Raises:
        ConfigError: a file cannot be read, `base` is no path, or the bases form a cycle or a chain of more than eight.
    """
    document, seen = read_file(file, name), [file.resolve()]
    folder = file.parent
    while "base" in document.value:
        base, place = document.value.pop("base"), document.places.pop(("base",))
        if not isinstance(base, str) or not base.strip():
            raise ConfigError(f"{place.where}: base: needs the path of a config, found {show(base)}. Try ../base.yaml.")
        path = Path(os.path.normpath(folder / base))
        if path.resolve() in seen or len(seen) > MAX_BASES:
            reason = "has this file as its base" if path.resolve() in seen else f"is base number {MAX_BASES + 1}"
            raise ConfigError(f"{place.where}: base: {base} {reason}. A chain of bases ends. Remove one of them.")
        seen.append(path.resolve())
        shown = os.path.normpath(os.path.join(os.path.dirname(place.where.rpartition(":")[0]), base))
        try:
            below = read_file(path, shown)
        except ConfigError as error:
            raise ConfigError(f"{place.where}: base: {error}") from None
        folder = path.parent
        values = _moved(below.value, (), os.path.relpath(folder, file.parent))
        document = _merged(document, Document(values, below.places, below.references))
    return document


def _merged(top: Document, below: Document) -> Document:
    places, references = dict(below.places), dict(below.references)
    value = _merge(top.value, below.value, (), (places, references))
    return Document(value, places | top.places, references | top.references)


def _merge(new: Any, old: Any, path: KeyPath, below: tuple[dict[KeyPath, Any], ...]) -> Any:
    if not isinstance(new, dict) or not isinstance(old, dict) or _selects_another(new, old, path):
        for known in below:
            for key in [p for p in known if p[: len(path)] == path]:
                del known[key]
        return new
    merged = {key: _merge(value, old[key], (*path, str(key)), below) for key, value in new.items() if key in old}
    return old | new | merged


def _selects_another(new: dict[Any, Any], old: dict[Any, Any], path: KeyPath) -> bool:
    if path in _CHOICES:
        return new.keys() != old.keys()
    is_schedule = any(isinstance(key, int) for key in new)  # of the batch size
    return is_schedule or ("name" in new and new["name"] != old.get("name"))


def _moved(value: Any, path: KeyPath, folder: str) -> Any:
    """Returns the values of a base with its relative paths as seen from the config that is run."""
    if folder == "." or path == ("task_args",):
        return value
    if isinstance(value, dict):
        return {
            _moved(key, (), folder) if isinstance(key, str) else key: _moved(inner, (*path, str(key)), folder)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_moved(inner, (*path, "[]"), folder) for inner in value]
    if not isinstance(value, str) or "://" in value or os.path.isabs(value):
        return value
    is_path = path in _PATHS or _PYTHON.fullmatch(value) is not None
    return os.path.normpath(os.path.join(folder, value)) if is_path else value
