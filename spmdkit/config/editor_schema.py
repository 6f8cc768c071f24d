"""The JSON schema of a config file for editors: the settings, and the names and arguments of everything that a config
selects by name: optimizers, schedules, reducers, syncs, hooks, trackers and preemption sources, also of other
distributions.

The schema of the settings is pydantic's. Names and arguments are read from the signatures of the functions, so that
this module lists none.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from spmdkit.config import optimizer, parameter_server
from spmdkit.config.show import json_schema
from spmdkit.foundation import plugins

Schema = dict[str, Any]

_KEYS = {
    ("reducer",): ("reducers", 0),
    ("sync",): ("syncs", 0),
    ("hooks", "items"): ("hooks", 0),
    ("preemption", "items"): ("preemption_sources", 0),
}
_TYPES: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
}
_NUM_TRACKER_ARGUMENTS = 2
"""A tracker is opened with the run and its last step, before its options."""


def editor_schema() -> Schema:
    """Returns the JSON schema (draft 2020-12) of a config file."""
    schema = json_schema()
    properties, definitions = schema["properties"], schema["$defs"]
    for (key, *items), (group, num) in _KEYS.items():
        _replace(properties[key] if not items else properties[key]["items"], _choice(group, num))
    _replace(definitions["Log"]["properties"]["trackers"]["items"], _choice("trackers", _NUM_TRACKER_ARGUMENTS))
    server = parameter_server.ParameterServer.model_json_schema()
    definitions |= server.pop("$defs", {})
    properties["sync"]["anyOf"][0]["enum"].append(parameter_server.NAME)
    properties["sync"]["anyOf"][2]["properties"][parameter_server.NAME] = server
    definitions["Schedule"] = {"anyOf": [{"type": "number", "minimum": 0}, {"anyOf": [*_schedules()]}]}
    definitions["Optimizer"] = {"anyOf": [*_optimizers()]}
    null = {"type": "null"}
    _replace(properties["optimizer"], {"anyOf": [{"$ref": "#/$defs/Optimizer"}, null]})
    _replace(properties["learning_rate"], {"anyOf": [{"$ref": "#/$defs/Schedule"}, null]})
    definitions["Reference"] = {"type": "string", "pattern": r"\$\{env:[A-Za-z_]"}
    for node in (schema, *definitions.values()):
        for name, value in node.get("properties", {}).items():
            node["properties"][name] = _or_reference(value)
    properties["base"] = {
        "type": "string",
        "description": "Path of a config, from this file's folder. This file has the differences from it.",
    }
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": ["base"]}]
    return schema


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _replace(old: Schema, new: Schema) -> None:
    """Replaces the types of a schema in place, without its description and default."""
    for key in ("anyOf", "type", "properties", "required"):
        old.pop(key, None)
    old |= new


def _or_reference(schema: Schema) -> Schema:
    """Returns a schema that also accepts `${env:NAME}`, if it does not accept all texts."""
    if schema.get("type") == "string" and "enum" not in schema and "pattern" not in schema:
        return schema
    about = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    types_only = {key: value for key, value in schema.items() if key not in about}
    return about | {"anyOf": [types_only, {"$ref": "#/$defs/Reference"}]}


def _choice(group: str, num_arguments: int) -> Schema:
    """Returns the schema of a name, or of a mapping of one name to its options."""
    factories = plugins.load_all(group)
    user_defined = {"pattern": ":", "description": "file.py:name or module:name of a user-defined function."}
    options = {name: _options(factory, group, num_arguments) for name, factory in factories.items()}
    return {
        "anyOf": [
            {"enum": [*factories]},
            {"type": "string", **user_defined},
            {
                "type": "object",
                "properties": options,
                "patternProperties": {":": {"type": "object"}},
                "additionalProperties": False,
                "minProperties": 1,
                "maxProperties": 1,
            },
        ]
    }


def _options(factory: Callable[..., Any], group: str, num_arguments: int) -> Schema:
    common = {key: {"type": "integer", "minimum": 0} for key in plugins.GROUPS[group].common_options}
    parameters = list(inspect.signature(factory).parameters.values())[num_arguments:]
    properties = {**_arguments(factory, parameters), **common}
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    named: Schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    about = {"description": _first_sentence(getattr(inspect.getmodule(factory), "__doc__", None) or "")}
    if len(parameters) == 1:
        return about | {"anyOf": [named, {"type": "number"}]}
    return about | {"anyOf": [named, {"type": "null"}]}


def _arguments(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> dict[str, Schema]:
    """Returns the schema of each named argument, from its annotation and its default."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # a name that is imported for type checkers only
        hints = {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: _typed(hints.get(p.name)) | _default(p.default) for p in parameters if p.kind in named}


def _default(value: Any) -> Schema:
    return {"default": value} if value is None or isinstance(value, bool | int | float | str) else {}


def _typed(hint: Any) -> Schema:
    """Returns the schema of an annotation; {} for one that a config cannot check."""
    origin = typing.get_origin(hint)
    if hint in _TYPES:
        return _TYPES[hint]
    if origin is Literal:
        return {"enum": list(typing.get_args(hint))}
    if origin in (typing.Union, types.UnionType):
        inner = [_typed(part) for part in typing.get_args(hint)]
        return {"anyOf": inner} if all(inner) else {}
    if origin in (Sequence, list, tuple):
        return {"type": "array"}
    return {"type": "object"} if origin in (Mapping, dict) else {}


def _named(name: str, function: Callable[..., Any], more: Mapping[str, Schema], names: list[str]) -> Schema:
    """Returns the schema of `{name: ..., argument: value}`. optax checks the values of the arguments."""
    arguments = {p.name: _default(p.default) for p in inspect.signature(function).parameters.values()}
    return {
        "type": "object",
        "title": name,
        "description": _first_sentence(function.__doc__ or ""),
        "properties": {"name": {"enum": names}, **arguments, **more},
        "required": ["name"],
        "additionalProperties": False,
    }


def _schedules() -> Iterator[Schema]:
    for name, function in optimizer.schedules().items():
        more: dict[str, Schema] = {"offset": {"type": "integer"}}
        if "schedules" in inspect.signature(function).parameters:
            more["schedules"] = {"type": "array", "items": {"$ref": "#/$defs/Schedule"}}
        yield _named(name, function, more, list(dict.fromkeys([name, name.removesuffix("_schedule")])))


def _optimizers() -> Iterator[Schema]:
    penalty: Schema = {"type": "number", "minimum": 0}
    more = {"learning_rate": {"$ref": "#/$defs/Schedule"}, "add_decayed_weights": penalty}
    for name, function in optimizer.optimizers().items():
        yield _named(name, function, more, [name])
