"""A check of a Kubernetes document against the schema of its CustomResourceDefinition, as `kubectl --validate=strict`
makes it.

A file of schemas/ is `spec.versions[].schema.openAPIV3Schema` of the definition, without descriptions; below a field
that no golden file has, only its name is left."""

from __future__ import annotations

import re
from typing import Any

TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}


def mistakes(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """Returns what of a document its schema does not have, a line each."""
    if "enum" in schema and value not in schema["enum"]:
        return [f"{path}: {value!r} is not one of {schema['enum']}"]
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, (int, str)) else [f"{path}: is neither a number nor a text"]
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (kind == "integer" and isinstance(value, bool))):
        return [f"{path}: is no {kind}"]
    if isinstance(value, dict):
        return _object(value, schema, path)
    if isinstance(value, list):
        found = [f"{path}: too many items"] * (len(value) > schema.get("maxItems", 1e9))
        return found + [
            line for i, x in enumerate(value) for line in mistakes(x, schema.get("items", {}), f"{path}[{i}]")
        ]
    if isinstance(value, str):
        short = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1e9)
        right = re.search(schema.get("pattern", ""), value) is not None
        return [f"{path}: {value!r} does not fit"] * (not (short and right))
    if isinstance(value, (int, float)) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return [f"{path}: {value} is out of range"]
    return []


def _object(value: dict[str, Any], schema: dict[str, Any], path: str) -> list[str]:
    properties, dot = schema.get("properties"), path and f"{path}."
    found = [f"{dot}{name}: is missing" for name in schema.get("required", ()) if name not in value]
    for name, x in value.items():
        if properties is not None and name in properties:
            found += mistakes(x, properties[name], f"{dot}{name}")
        elif isinstance(schema.get("additionalProperties"), dict):
            found += mistakes(x, schema["additionalProperties"], f"{dot}{name}")
        elif properties is not None and not schema.get("x-kubernetes-preserve-unknown-fields"):
            found.append(f"{dot}{name}: no such field")
    return found
