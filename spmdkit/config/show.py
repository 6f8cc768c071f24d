"""Writes a config as resolved YAML that loads back to an equal config, and the JSON schema for editors."""

from __future__ import annotations

import os
from typing import Any

import yaml

from spmdkit.config.problems import KeyPath, dotted
from spmdkit.config.schema import Config
from spmdkit.config.source import PLAIN
from spmdkit.foundation import redact


class _Dumper(yaml.SafeDumper):
    """Quotes text that source.py, or a YAML 1.1 parser (`off`, dates), would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    # PyYAML folds these line breaks of YAML 1.1 into spaces unless they are escaped.
    style = '"' if any(c in value for c in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


for _kind, (_pattern, _) in PLAIN.items():
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, None)
_Dumper.add_representer(str, _text)
_Dumper.add_representer(tuple, _Dumper.represent_list)


def to_yaml(
    config: Config, absolute_paths: bool = False, hide_secrets: bool = False, keep_references: bool = False
) -> str:
    """Returns every setting, including defaults, as YAML that loads back to an equal config.

    With `absolute_paths`, `task`, `run_dir` and the source of `init_from` are absolute, so that the text is valid in
    any folder. With `hide_secrets` (used for all files), secrets are `***`. Such a config is rejected until the values
    are filled in. With `keep_references`, a value that was written as `${env:NAME}` is written so again.
    """
    values = config.model_dump() | {"mesh": _mesh(config)}
    return _written(config, values, absolute_paths, hide_secrets, keep_references)


def to_short_yaml(config: Config, absolute_paths: bool = False, hide_secrets: bool = False) -> str:
    """Like `to_yaml`, but returns only the settings that differ from the defaults."""
    values = config.model_dump(exclude_defaults=True)
    meshes = {"mesh": _mesh(config)} if config.mesh.sizes() else {}
    return _written(config, values | meshes, absolute_paths, hide_secrets)


def _mesh(config: Config) -> dict[str, int]:
    names: dict[str, str] = {axis: name for name, axis in config.roles.items()}
    return {names.get(axis, axis): size for axis, size in config.mesh.sizes().items()}


def _written(
    config: Config, values: dict[str, Any], absolute_paths: bool, hide_secrets: bool, keep_references: bool = False
) -> str:
    if hide_secrets:
        values = redact.redact_value(values)
    if absolute_paths:
        values["task"] = ":".join(config.task_reference())
        values["run_dir"] = str(config.resolved_run_dir())
        if config.init_from is not None:
            key = "file" if config.init_from.path is None else "path"
            values["init_from"] |= {key: config.init_from.located(config.folder)}
    for path, text in config._origin.references.items() if keep_references else ():
        is_relative = path in (("task",), ("run_dir",)) and not os.path.isabs(getattr(config, path[0]))
        _put(values, path, os.path.join(config.folder, text) if absolute_paths and is_relative else text)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


def _put(values: Any, path: KeyPath, text: str) -> None:
    """Replaces the value at a path, if the values have it: a schedule of the batch size has other keys."""
    *parents, last = path
    for part in parents:
        known = isinstance(values, dict | list)
        values = values[part] if known and (part in values or isinstance(part, int)) else None
    if isinstance(values, dict | list) and (last in values or isinstance(last, int)):
        values[last] = text  # type: ignore[index]


END_OF_SCALAR = "\n...\n"
"""What PyYAML appends to a document that is one plain value."""


def origins(config: Config) -> list[tuple[str, str]]:
    """Returns (`key=value`, origin) of each setting: a file and line, an override, or `default`."""
    places, rows = config._origin.places, list[tuple[str, str]]()
    inside = {path[:end] for path in places for end in range(len(path))}

    def add(value: Any, path: KeyPath) -> None:
        if isinstance(value, dict) and value and (path not in places or path in inside):
            for key, inner in value.items():
                add(inner, (*path, str(key)))
            return
        text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6, allow_unicode=True)
        known = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in places), None)
        is_default = known is None or (known != path and known in inside)
        place = "default" if known is None or is_default else places[known].where
        rows.append((f"{dotted(path)}={text.split(END_OF_SCALAR)[0].strip()}", place))

    values = config.model_dump() | {"mesh": _mesh(config)}
    for key, value in redact.redact_value(values).items():
        add(value, (key,))
    return rows


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema (draft 2020-12) of a config file, with a description for every key."""
    schema = Config.model_json_schema(mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "spmdkit config"}
