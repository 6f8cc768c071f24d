"""Converts pydantic's errors to problems: the rule, the value, the smallest repair.

The rule is a sentence of pydantic ("should be greater than or equal to 1") or of a custom validator
(`fields.InvalidValue`). This module adds the key, the value as in YAML, and the repair: the nearest name, a bound, the
default, or an example of the field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from spmdkit.config.fields import InvalidValue, descriptions
from spmdkit.config.problems import KeyPath, Problem, dotted, show
from spmdkit.config.sections import Mesh
from spmdkit.foundation.formatting import nearest


def translate(model: type[BaseModel], errors: Sequence[Any]) -> list[Problem]:
    """Returns the problems of pydantic's error dicts."""
    follows = "default_factory_not_called"  # a consequence of another problem in the same section
    return [_translate(model, error) for error in errors if error["type"] != follows]


def _translate(model: type[BaseModel], error: Mapping[str, Any]) -> Problem:
    path: KeyPath = tuple(error["loc"])
    kind, value = error["type"], error["input"]
    if (path and path[-1] == "[key]") or kind == "invalid_key":
        names = path[:-1] if path[-1] == "[key]" else path
        found = show(value) if path[-1] == "[key]" else f"{names[-1]}"
        return Problem((*names[:-1], str(names[-1])), f"needs a key that is text, found {found}. Put it in quotes.")
    section = section_at(model, path[:-1])
    if kind == "extra_forbidden" and section:
        return Problem(path, _unknown_key(model, section, path))
    info = _field(model, path)
    if kind == "missing" and section and info is not None:
        about = descriptions(section)[str(path[-1])]
        return Problem(path, f"is missing: {about[:1].lower()}{about[1:]} Add {path[-1]}: {_example(info) or '...'}")
    if kind in ("model_type", "dict_type"):
        inner = section_at(model, path)
        keys = f" with keys out of {', '.join(inner.model_fields)}" if inner else ""
        rule = f"should be a mapping{keys}"
    else:
        rule = re.sub(r"^(Input|List|String) should|^Value error, should", "should", error["msg"])
    return Problem(path, f"{rule}, found {show(value)}. {_repair(path, info, error)}".rstrip())


def _unknown_key(model: type[BaseModel], section: type[BaseModel], path: KeyPath) -> str:
    key, keys = str(path[-1]), list(section.model_fields)
    holders = [dotted(p) for p, m in sections(model) if key in m.model_fields and m is not section]
    if holders:
        return (
            "unknown key. Did you mean "
            f"{' or '.join(f'{h}.{key}' if h else f'{key} at the top level' for h in holders)}?"
        )
    if section is Mesh:
        axes = nearest(key, keys) or f" The axes are {', '.join(keys)}."
        return f"unknown key.{axes} Your own name of an axis needs its role, such as roles: {{{key}: data}}."
    owner = dotted(path[:-1]) or "a config"
    return f"unknown key.{nearest(key, keys) or f' The keys of {owner} are ' + ', '.join(keys) + '.'}"


def _repair(path: KeyPath, info: FieldInfo | None, error: Mapping[str, Any]) -> str:
    key = next((str(p) for p in reversed(path) if isinstance(p, str)), "")
    context, value = error.get("ctx", {}), error["input"]
    expects = context.get("error")
    options: Sequence[str] = re.findall(r"'([^']*)'", str(context.get("expected", "")))
    if isinstance(expects, InvalidValue):
        options = expects.options
    if isinstance(value, str) and (hint := nearest(value, options)):
        return hint.strip()
    if value is False and "off" in options:  # YAML 1.1 reads off as false
        return f"Write {key}: off."
    number = {"int_type": r"-?\d+", "float_type": r"-?\d+(\.\d+)?"}.get(error["type"])
    if number and isinstance(value, str) and re.fullmatch(number, value):
        return f"Write {key}: {value[:40]}, without quotes."
    if error["type"] == "string_type" and isinstance(value, int | float):
        return f"Write {key}: '{json.dumps(value)[:40]}', in quotes."
    if error["type"] == "model_type":
        return f"Put its keys below {key}:, indented, or remove it."
    example = expects.example if isinstance(expects, InvalidValue) else context.get("ge", context.get("le"))
    if example in (None, "") and info is not None and not isinstance(path[-1], int):
        example = _example(info)
    return f"Try {key}: {example}." if example not in (None, "") else f"Correct or remove {key}."


def _example(info: FieldInfo) -> str:
    """Returns a valid value as in YAML; an empty string if none is known."""
    value = info.default if isinstance(info.default, bool | int | float | str) else None
    for holder in (info, *info.metadata, *_inside(info.annotation)):
        examples = getattr(holder, "examples", None)
        value = examples[0] if value is None and examples else value
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _inside(annotation: Any) -> Iterator[Any]:
    """Yields the metadata of the types in an annotation other than None."""
    for arg in get_args(annotation):
        yield from getattr(arg, "__metadata__", ())


def sections(model: type[BaseModel], path: KeyPath = ()) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    """Yields (path, model) for a model and every section in it."""
    yield path, model
    for name, info in model.model_fields.items():
        for inner in _models(info.annotation):
            yield from sections(inner, (*path, name))


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (list, dict, tuple):
        return []
    return [m for arg in get_args(annotation) for m in _models(arg)]


def section_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """Returns the model that has the keys at `path`."""
    for part in path:
        info = model.model_fields.get(str(part))
        inner = _models(info.annotation) if info else []
        if not inner:
            return None
        model = inner[0]
    return model


def _field(model: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    """Returns the field at `path`, or the enclosing field for an item of a list or a free mapping."""
    for end in range(len(path), 0, -1):
        section = section_at(model, path[: end - 1])
        if section and str(path[end - 1]) in section.model_fields:
            return section.model_fields[str(path[end - 1])]
    return None
