"""Problems of a config as sentences: the position, the request, the value, the rule and the smallest repair.

A problem has only its key. `Origin` has the position of each key, and `render` prefixes each problem with the file and
line, or with the override.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

MAX_PROBLEMS = 10

KeyPath = tuple[str | int, ...]


class Location(NamedTuple):
    """The position of a value: `a.yaml:3` or `override steps=3`; line 0 for overrides."""

    where: str
    line: int


class Problem(NamedTuple):
    """One problem without its position."""

    path: KeyPath
    text: str


@dataclass(frozen=True)
class Origin:
    """The origin of a config. `file` is absolute, `name` as the user wrote it. Both are unset for Python values.
    `references`: the text of values with `${env:NAME}`."""

    file: Path | None = None
    name: str = ""
    places: Mapping[KeyPath, Location] = field(default_factory=lambda: MappingProxyType({}))
    references: Mapping[KeyPath, str] = field(default_factory=lambda: MappingProxyType({}))

    def place(self, path: KeyPath) -> Location:
        """Returns the position of the key, or of the nearest enclosing mapping with a position."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return Location(self.name, 0)

    def where(self, path: KeyPath) -> str:
        """Returns `a.yaml:3: mesh.data`."""
        place = self.place(path).where
        return ": ".join(part for part in (place, dotted(path)) if part)


def dotted(path: KeyPath) -> str:
    """Returns `layout.rules[0]` for a path; parts that cannot be printed are quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if part.isprintable() and len(part) <= 80 else repr(part[:60])
            text += f".{name}" if text else name
    return text


def key_path(key: str) -> KeyPath:
    """Returns the path of a dotted key: `mesh.data`, `groups.0`."""
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


def render(found: Sequence[Problem], origin: Origin) -> str:
    """Returns one line per problem, in file order, at most `MAX_PROBLEMS`."""
    ordered = sorted(found, key=lambda p: origin.place(p.path).line)
    lines = [f"{start}: {p.text}" if (start := origin.where(p.path)) else p.text for p in ordered[:MAX_PROBLEMS]]
    if len(ordered) > MAX_PROBLEMS:
        lines.append(f"and {len(ordered) - MAX_PROBLEMS} more problems; fix these first.")
    return "\n".join(lines)


_TYPES: dict[Any, str] = {bool: "", str: "text", int: "a whole number", float: "a number"}
_TYPES |= {list | tuple: "a list", dict: "a mapping"}


def show(value: Any) -> str:
    """Returns a value as short text for a message, with its type if that is not obvious."""
    name = "" if value is None else next((name for kind, name in _TYPES.items() if isinstance(value, kind)), None)
    return f"a Python {type(value).__name__}" if name is None else f"{_short(value)} ({name})".removesuffix(" ()")


def _short(value: Any, depth: int = 0) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 128 else f"<{value.bit_length()} bits>"
    if isinstance(value, float):
        return str(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else repr(value[:57]) + "..."
    if not isinstance(value, list | tuple | dict) or depth > 2:
        return "..." if isinstance(value, list | tuple | dict) else f"<{type(value).__name__}>"
    if isinstance(value, dict):
        parts = [f"{_short(k, depth + 1)}: {_short(v, depth + 1)}" for k, v in list(value.items())[:4]]
    else:
        parts = [_short(v, depth + 1) for v in value[:4]]
    body = ", ".join(parts + ["..."] * (len(value) > 4))
    return f"{{{body}}}" if isinstance(value, dict) else f"[{body}]"
