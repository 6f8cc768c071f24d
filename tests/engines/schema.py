"""A check of a Kubernetes document against the schema of its CustomResourceDefinition, as `kubectl --validate=strict`
makes it."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
KEPT = (
    "type",
    "properties",
    "items",
    "required",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "maxLength",
    "minLength",
    "maxItems",
)


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


def pruned(schema: Any, wanted: Any) -> Any:
    """Returns a schema without descriptions; below a field whose name `wanted` lacks nothing but its name is kept."""
    kept = {
        key: schema[key]
        for key in (*KEPT, "additionalProperties", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields")
        if key in schema
    }
    if "properties" in kept:
        kept["properties"] = {
            name: pruned(x, wanted) if name in wanted else {} for name, x in kept["properties"].items()
        }
    if "items" in kept:
        kept["items"] = pruned(kept["items"], wanted)
    if isinstance(kept.get("additionalProperties"), dict):
        kept["additionalProperties"] = pruned(kept["additionalProperties"], wanted)
    return kept


if __name__ == "__main__":
    # python -m tests.engines.schema CRD.yaml GOLDEN.yaml... > schemas/KIND.json: every field of the definition by name,
    # whole where a golden file has it.
    import yaml

    def names(x: Any) -> set[str]:
        if isinstance(x, dict):
            return set(x) | {n for y in x.values() for n in names(y)}
        return {n for y in x for n in names(y)} if isinstance(x, list) else set()

    with open(sys.argv[1]) as file:
        definition = yaml.safe_load(file)
    version = next(v for v in definition["spec"]["versions"] if v["storage"])
    wanted = set()
    for name in sys.argv[2:]:
        with open(name) as file:
            wanted |= names(yaml.safe_load("".join(line for line in file if not line.startswith(("---", "$")))))
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    print(json.dumps(pruned(schema, wanted | {"spec"}), separators=(",", ":"), sort_keys=True))
