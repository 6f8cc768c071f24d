"""Says what pydantic found wrong in the config's own words, made from the type of the field.

pydantic reports a location, a kind and the value; the sentence is ours: what the field needs (`Expects`), what was
found, the rule, the repair. Nothing of pydantic's wording reaches a user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from spmdkit.config.fields import Expects
from spmdkit.config.problems import KeyPath, Problem, dotted, show
from spmdkit.words import nearest


def translate(model: type[BaseModel], errors: Sequence[Any]) -> list[Problem]:
    """Returns the problems behind pydantic's error dicts, in our words."""
    return [_translate(model, error) for error in errors]


def _translate(model: type[BaseModel], error: Mapping[str, Any]) -> Problem:
    path: KeyPath = tuple(error["loc"])
    kind, value = error["type"], error["input"]
    if (path and path[-1] == "[key]") or kind == "invalid_key":
        names = path[:-1] if path[-1] == "[key]" else path
        found = show(value) if path[-1] == "[key]" else f"{names[-1]}"
        return Problem((*names[:-1], str(names[-1])), f"needs a key that is text, found {found}. Put it in quotes.")
    section = _section(model, path[:-1])
    if kind == "extra_forbidden" and section:
        return Problem(path, _unknown_key(model, section, path))
    if kind == "missing" and section:
        info = section.model_fields[str(path[-1])]
        return Problem(path, f"is missing: {_lower(info.description or '')} Add {path[-1]}: {_example(info) or '...'}")
    info_at = _field(model, path)
    if info_at is None:
        return Problem(path, f"needs a mapping of keys, found {show(value)}.")
    wants = _expects(info_at, isinstance(path[-1], int))
    key = next((str(p) for p in reversed(path) if isinstance(p, str)), "")
    sentences = [f"needs {wants.phrase}, found {show(value)}.", *_rule(error), _repair(key, wants, info_at, error)]
    return Problem(path, " ".join(s for s in sentences if s))


def _unknown_key(model: type[BaseModel], section: type[BaseModel], path: KeyPath) -> str:
    key, keys = str(path[-1]), list(section.model_fields)
    holders = [dotted(p) for p, m in _sections(model) if key in m.model_fields and m is not section]
    if holders:
        return f"unknown key. Did you mean {' or '.join(f'{h}.{key}' if h else f'{key} at the top level' for h in holders)}?"
    owner = dotted(path[:-1]) or "a config"
    return f"unknown key.{nearest(key, keys) or f' The keys of {owner} are ' + ', '.join(keys) + '.'}"


def _rule(error: Mapping[str, Any]) -> Iterator[str]:
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        yield str(context["error"])
    for bound, words in (("le", "at most"), ("lt", "below")):
        if error["type"] in ("less_than_equal", "less_than") and bound in context:
            yield f"It must be {words} {context[bound]}."
    if error["type"] == "finite_number":
        yield "NaN and infinity are refused."


def _repair(key: str, wants: Expects, info: FieldInfo, error: Mapping[str, Any]) -> str:
    kind, value = error["type"], error["input"]
    if kind in ("int_type", "float_type", "int_from_float") and isinstance(value, str | float):
        number = _as_number(value, whole=kind != "float_type")
        if number:
            return f"Write {key}: {number}{', without quotes' if isinstance(value, str) else ''}."
    if kind == "bool_type" and str(value).lower() in _BOOL_WORDS:
        return f"Write {key}: {_BOOL_WORDS[str(value).lower()]}."
    if kind == "string_type" and isinstance(value, int | float | bool):
        return f"Write {key}: '{_scalar(value)}', in quotes."
    if kind in ("greater_than_equal", "less_than_equal"):
        return f"Try {key}: {error['ctx'].get('ge', error['ctx'].get('le'))}."
    if isinstance(value, str) and (hint := nearest(value, wants.options)):
        return hint.strip()
    if value is False and "off" in wants.options:
        return f"Write {key}: off."
    if value is None and not info.is_required():
        return f"Remove {key} to get its default."
    if kind == "model_type":
        return f"Put its keys below {key}:, indented."
    example = _example(info) or wants.example
    return f"Try {key}: {example}." if example else ""


_BOOL_WORDS = {"yes": "true", "on": "true", "y": "true", "1": "true", "true": "true"} | {
    "no": "false",
    "off": "false",
    "n": "false",
    "0": "false",
    "false": "false",
}


def _as_number(value: str | float, whole: bool) -> str:
    """Returns how the number that `value` seems to mean is written, or an empty string."""
    if isinstance(value, float):
        return str(int(value)) if whole and value.is_integer() and abs(value) < 1e15 else ""
    text = value.strip().replace("_", "").replace(",", "")
    if len(text) > 40:
        return ""
    try:
        number = float(text)
    except ValueError:
        return ""
    if number - number != 0:
        return ""
    if whole and not number.is_integer():
        return ""
    return str(int(number)) if whole else text


def _example(info: FieldInfo) -> str:
    default = info.default
    wants = _expects(info, False)
    if wants.example:
        return wants.example
    return _scalar(default) if isinstance(default, bool | int | float | str) else ""


def _scalar(value: bool | int | float | str) -> str:
    """Returns a short scalar as one writes it in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _sections(model: type[BaseModel], path: KeyPath = ()) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    yield path, model
    for name, info in model.model_fields.items():
        for inner in _models(info.annotation):
            yield from _sections(inner, (*path, name))


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (list, dict, tuple):
        return []
    return [m for arg in get_args(annotation) for m in _models(arg)]


def _section(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """Returns the model that holds the keys at `path`."""
    for part in path:
        info = model.model_fields.get(str(part))
        inner = _models(info.annotation) if info else []
        if not inner:
            return None
        model = inner[0]
    return model


def _field(model: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    """Returns the field at `path`, or the one around it for an item of a list or of a free mapping."""
    for end in range(len(path), 0, -1):
        section = _section(model, path[: end - 1])
        if section and str(path[end - 1]) in section.model_fields:
            return section.model_fields[str(path[end - 1])]
    return None


def _expects(info: FieldInfo, item: bool) -> Expects:
    own = next((m for m in info.metadata if isinstance(m, Expects)), None)
    return own if own and not item else _annotation_expects(info.annotation, item)


def _annotation_expects(annotation: Any, item: bool = False) -> Expects:
    """Returns what a type wants in words; `item` asks for what one item of a list wants."""
    origin, args = get_origin(annotation), get_args(annotation)
    for arg in getattr(annotation, "__metadata__", ()):
        if isinstance(arg, Expects):
            return arg
    if origin is Literal:
        names = [str(a) for a in args]
        return Expects(f"{', '.join(names[:-1])} or {names[-1]}", names[0], names)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Expects(f"a mapping with keys out of {', '.join(annotation.model_fields)}")
    if origin is list:
        inner = _annotation_expects(args[0])
        return inner if item else Expects(f"a list, each {inner.phrase}", inner.example)
    if origin is dict:
        inner = _annotation_expects(args[1])
        return inner if inner.phrase else Expects("a mapping")
    members = [_annotation_expects(a, item) for a in args if a is not type(None)]
    if len(members) == 1:
        found = members[0]
        return found._replace(phrase=f"{found.phrase}, or null") if type(None) in args else found
    return Expects("")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
