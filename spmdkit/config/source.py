"""YAML text and `key=value` overrides into plain values, with the place of every key. Nothing here can run code.

The dialect is YAML 1.2's core: only true and false are booleans (`off` and `yes` are text), `1e-3` is a number, `012`
is twelve. Refused, each with its line: anchors and aliases (a few lines can unfold to gigabytes), tags
(`!!python/...`), keys given twice, keys without a value, more than one document, deep nesting, large files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import yaml

from spmdkit.config.problems import KeyPath, Place, dotted, show
from spmdkit.errors import ConfigError
from spmdkit.words import nearest

MAX_BYTES = 2**20
MAX_DEPTH = 32
MAX_NODES = 10_000

_YAML_TAG = "tag:yaml.org,2002:"

RESOLVERS: Sequence[tuple[str, str, str]] = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
)
"""(kind, pattern, first characters) of plain scalars, in order; everything else is text. `show.py` writes by them."""


class Document(NamedTuple):
    """Plain values, and the place of every key and list item."""

    value: Any
    places: dict[KeyPath, Place]


def add_core_schema(loader_or_dumper: type) -> None:
    """Adds the implicit types of `RESOLVERS` to those that a PyYAML class has."""
    for kind, pattern, first in RESOLVERS:
        compiled = re.compile(rf"(?:{pattern})\Z")
        starts = ["" if c == "\0" else c for c in first]
        loader_or_dumper.add_implicit_resolver(f"{_YAML_TAG}{kind}", compiled, starts)  # type: ignore[attr-defined]


class _Loader(yaml.SafeLoader):
    """Composes nodes only, and refuses what plain values do not need; `_plain` makes the values."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # type: ignore[misc]  # no dates, no yes/no, no merge keys
    depth = 0
    num_nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        line = event.start_mark.line
        tag = event.tag.replace(_YAML_TAG, "!!") if getattr(event, "tag", None) else ""
        what = f"*{event.anchor}" if isinstance(event, yaml.AliasEvent) else f"&{event.anchor}" if event.anchor else tag
        if what:
            raise _Refused(line, f"{what} is refused: a config holds plain values. Write the value itself.")
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise _Refused(
                line, f"more than {MAX_NODES} values. A config holds settings; put data in a file of its own."
            )
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _Refused(line, f"nested more than {MAX_DEPTH} deep. Write it flatter.")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


add_core_schema(_Loader)


class _Refused(Exception):
    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line
        self.text = text


def read_file(path: Path, name: str) -> Document:
    """Returns the values of the YAML file; `name` is the path as the user wrote it, for messages.

    Raises:
        ConfigError: no such file, not readable, larger than 1 MiB, not UTF-8, not one YAML mapping.
    """
    try:
        if not path.is_file():
            raise ConfigError(_no_file(path, name))
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ConfigError(
                f"{name}: has {size} bytes, found more than {MAX_BYTES} (1 MiB), the most a config may have."
            )
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name!r}: cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{name}:{line}: needs UTF-8 text, found the byte 0x{data[error.start]:02x}. Save the file as UTF-8."
        ) from None
    document = parse(text, lambda line: Place(f"{name}:{line}", line), name)
    if document.value is None:
        raise ConfigError(f"{name}: is empty. A config needs at least one line: `task: my_task.py:task`.")
    if not isinstance(document.value, dict):
        raise ConfigError(
            f"{name}:1: needs a mapping of keys (`steps: 100`), found {show(document.value)}. "
            "Write one `key: value` on each line."
        )
    return document


def parse(text: str, place: Any, name: str) -> Document:
    """Returns the values of YAML text; `place(line)` makes the Place of a line (from 1)."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        places: dict[KeyPath, Place] = {}
        value = None if node is None else _plain(node, (), places, place)
    except _Refused as error:
        raise ConfigError(f"{place(error.line + 1).where}: {error.text}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{place(line).where}: the character {chr(error.character)!r} is not allowed in YAML. Remove it."
        ) from None
    except yaml.MarkedYAMLError as error:
        at_end = error.context_mark and re.search("stream end|end of stream", error.problem or "")
        mark = error.context_mark if at_end else error.problem_mark or error.context_mark
        where = place(mark.line + 1).where if mark else name
        context = f" ({error.context})" if error.context else ""
        raise ConfigError(
            f"{where}: not YAML: {error.problem}{context}. Look at the indentation (spaces, no tabs), the quotes, the colons and the "
            f"brackets around this line."
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{name}: is not YAML: {error}") from None
    return Document(value, places)


def _plain(node: Any, path: KeyPath, places: dict[KeyPath, Place], place: Any) -> Any:
    line = node.start_mark.line
    if isinstance(node, yaml.ScalarNode):
        if node.value == "" and node.style is None:
            what = dotted(path) or "the config"
            raise _Refused(line, f"{what} has no value. Write one after it, or null, or remove the key.")
        return _scalar(node, line)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for i, item in enumerate(node.value):
            places[(*path, i)] = place(item.start_mark.line + 1)
            items.append(_plain(item, (*path, i), places, place))
        return items
    mapping: dict[Any, Any] = {}
    lines: dict[Any, int] = {}
    for key_node, value_node in node.value:
        key_line = key_node.start_mark.line
        if not isinstance(key_node, yaml.ScalarNode):
            raise _Refused(key_line, "a key is a list or a mapping; keys are plain text. Write `key: value`.")
        key = _scalar(key_node, key_line)
        if key in mapping:
            raise _Refused(
                key_line,
                f"{dotted((*path, str(key)))} is given twice, first on line {lines[key] + 1}. Keep one of them.",
            )
        inner: KeyPath = (*path, str(key))
        places[inner] = place(key_line + 1)
        mapping[key], lines[key] = _plain(value_node, inner, places, place), key_line
    return mapping


def _scalar(node: yaml.ScalarNode, line: int) -> Any:
    kind, text = node.tag.rsplit(":", 1)[-1], node.value
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind in ("int", "float") and len(text) > 100:
        raise _Refused(line, f"a number with {len(text)} digits. No setting needs more than 100.")
    if kind == "int":
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if kind == "float":
        return _float(text.lower())
    return text


def _float(text: str) -> float:
    if text.endswith(".inf"):
        return -math.inf if text.startswith("-") else math.inf
    return math.nan if text.endswith(".nan") else float(text)


def _no_file(path: Path, name: str) -> str:
    if path.is_dir():
        return f"{name}: is a directory; a config is a YAML file. Name the file in it."
    if path.exists():
        return f"{name}: is no regular file; a config is a YAML file."
    try:
        near = sorted(p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml"))
    except OSError:
        return f"{name}: no such file, and no folder {path.parent}. Check the path."
    hint = nearest(path.name, near) or (f" {path.parent} holds {', '.join(near[:5])}." if near else "")
    return f"{name}: no such file.{hint} A config is named by its path."
