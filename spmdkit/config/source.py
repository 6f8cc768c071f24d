"""Parses YAML, JSON and TOML text into plain values, with the position of every key. It cannot run code.

The format is the core schema of YAML 1.2: only true and false are booleans (`off` and `yes` are text), `1e-3` is a
number, `012` is twelve. Rejected, with the line: anchors and aliases (a few lines can expand to gigabytes), tags
(`!!python/...`), duplicate keys, keys without a value, several documents, deep nesting, large files. JSON is a subset.

`${env:NAME}` and `${env:NAME:default}` in a value are replaced by the environment variable. A value that is only a
reference has the type of its text: with LR=3e-3, `learning_rate: ${env:LR}` is a number. Any other `${` is rejected.
"""

from __future__ import annotations

import datetime
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from spmdkit.config.problems import KeyPath, Location, Origin, dotted, show
from spmdkit.errors import ConfigError
from spmdkit.foundation import redact
from spmdkit.foundation.formatting import nearest

MAX_BYTES = 2**20
MAX_DEPTH = 32
MAX_VALUES = 10_000
MAX_DIGITS = 100

_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
PLAIN: dict[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)\Z"), lambda _text: None),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), lambda text: text.lower() == "true"),
    "int": (
        re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"),
        lambda text: int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)),
    ),
    "float": (re.compile(rf"(?:{_FLOAT})\Z"), lambda text: float(re.sub(r"\.(?=[iInN])", "", text))),
}
"""Type -> (its unquoted form, its value), in order of precedence; everything else is text. Also used by `show.py`."""


SUFFIXES = (".yaml", ".yml", ".json", ".toml")
REFERENCE = re.compile(r"\$\{env:(?P<name>[A-Za-z_]\w*)(?::(?P<default>[^${}]*))?\}", re.ASCII)


class Document(NamedTuple):
    """Plain values, the position of every key and list item, and the text of values with `${env:NAME}`."""

    value: Any
    places: dict[KeyPath, Location]
    references: dict[KeyPath, str]


class _Refused(Exception):
    def __init__(self, event: Any, text: str) -> None:
        super().__init__(text)
        self.line = event.start_mark.line + 1


def read_file(path: Path, name: str) -> Document:
    """Returns the values of the file; `name` is the path as the user wrote it, for messages.

    Raises:
        ConfigError: the file is missing, not readable, larger than 1 MiB, not UTF-8, or not one mapping.
    """
    try:
        if not path.is_file():
            raise ConfigError(f"{name}: {_no_file(path)}")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ConfigError(
                f"{name}: has {size} bytes. A config has at most {MAX_BYTES} (1 MiB). Store data in separate files."
            )
        data = path.read_bytes()
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{name}:{line}: needs UTF-8 text, found the byte 0x{data[error.start]:02x}. Save the file as UTF-8."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name!r}: cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    place = lambda line: Location(f"{name}:{line}", line)
    if path.suffix == ".toml":
        document = _parse_toml(text, place, name)
    else:  # JSON may be indented by tabs
        document = parse(text.replace("\t", " ") if path.suffix == ".json" else text, place, name)
    if document.value is None:
        raise ConfigError(f"{name}: is empty. A config needs at least one line: `task: my_task.py:task`.")
    if not isinstance(document.value, dict):
        raise ConfigError(
            f"{name}:1: needs a mapping of keys (`steps: 100`), found {show(document.value)}. "
            "Write one `key: value` on each line."
        )
    return document


def _no_file(path: Path) -> str:
    if path.is_dir():
        return "is a directory; a config is a YAML file. Name the file in it."
    if path.exists():
        return "is no regular file; a config is a YAML file."
    if not path.parent.is_dir():
        return f"no such file, and no folder {path.parent}. Check the path."
    near = sorted(p.name for p in path.parent.iterdir() if p.suffix in SUFFIXES)
    hint = nearest(path.name, near) or (f" {path.parent} holds {', '.join(near[:5])}." if near else "")
    return f"no such file.{hint} A config is a YAML, JSON or TOML file. Correct the path."


def parse(text: str, place: Callable[[int], Location], name: str) -> Document:
    """Returns the values of YAML text. `place(line)` returns the Location of a line (from 1)."""
    walk = _Reader(text, place)
    try:
        return Document(walk.document(), walk.places, walk.references)
    except _Refused as error:
        raise ConfigError(f"{place(error.line).where}: {error}") from None
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
            f"{where}: not YAML: {error.problem}{context}. Look at the indentation (spaces, no tabs), the quotes, the "
            "colons and the brackets around this line."
        ) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name}: is not YAML: {error}") from None


class _Reader:
    """Builds plain values from the events of PyYAML's parser, and records the position of each key and list item."""

    def __init__(self, text: str, place: Callable[[int], Location]) -> None:
        self.places: dict[KeyPath, Location] = {}
        self.references: dict[KeyPath, str] = {}
        self._place = place
        self._num_values = 0
        self._text = text

    def document(self) -> Any:
        """Returns the value of the single document, or None without one."""
        self._events = yaml.parse(self._text, Loader=yaml.SafeLoader)
        next(self._events)  # the stream begins
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return None
        value = self._value(next(self._events), ())
        next(self._events)  # the document ends
        if not isinstance(after := next(self._events), yaml.StreamEndEvent):
            raise _Refused(after, "another document begins here; a config is one. Put it into its own file.")
        return value

    def _value(self, event: Any, path: KeyPath) -> Any:
        self._bounds(event, path)
        if isinstance(event, yaml.SequenceStartEvent):
            items = enumerate(self._until(yaml.SequenceEndEvent))
            return [self._placed(item, item, (*path, i)) for i, item in items]
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if event.value == "" and event.style is None:
            what = dotted(path) or "the config"
            raise _Refused(event, f"{what} has no value. Write one after it, or null, or remove the key.")
        if "${" in event.value:
            self.references[path] = event.value
            return self._resolved(event, path)
        return event.value if event.style is not None else self._plain(event, event.value)

    def _resolved(self, event: Any, path: KeyPath) -> Any:
        text = resolve(event.value, lambda problem: _Refused(event, f"{dotted(path) or 'the value'}: {problem}"))
        return self._plain(event, text) if REFERENCE.fullmatch(event.value) else text

    def _plain(self, event: Any, text: str) -> Any:
        try:
            return plain(text)
        except ValueError as error:
            raise _Refused(event, str(error)) from None

    def _placed(self, begin: Any, event: Any, path: KeyPath) -> Any:
        self.places[path] = self._place(begin.start_mark.line + 1)
        return self._value(event, path)

    def _mapping(self, path: KeyPath) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for event in self._until(yaml.MappingEndEvent):
            self._bounds(event, path)
            if not isinstance(event, yaml.ScalarEvent):
                raise _Refused(event, "a key is a list or a mapping; keys are plain text. Write `key: value`.")
            key = event.value if event.style is not None else self._plain(event, event.value)
            inner = (*path, str(key))
            if key in values:
                first = self.places[inner].line or 1  # an override is a single line
                raise _Refused(event, f"{dotted(inner)} is given twice, first on line {first}. Keep one of them.")
            values[key] = self._placed(event, next(self._events), inner)
        return values

    def _until(self, end: type[yaml.Event]) -> Iterator[Any]:
        while not isinstance(event := next(self._events), end):
            yield event

    def _bounds(self, event: Any, path: KeyPath) -> None:
        """Rejects YAML features that plain values do not need."""
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if anchor or tag:
            sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
            what = f"{sign}{anchor}" if anchor else str(tag).replace("tag:yaml.org,2002:", "!!")
            raise _Refused(event, f"{what} is refused: a config holds plain values. Write the value itself.")
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise _Refused(event, f"more than {MAX_VALUES} values. A config holds settings; put data in its own file.")
        if len(path) >= MAX_DEPTH:
            raise _Refused(event, f"nested more than {MAX_DEPTH} deep. Write it flatter.")


def plain(text: str) -> Any:
    """Returns the value of unquoted text. Raises ValueError for a very long number."""
    for kind, (pattern, convert) in PLAIN.items():
        if pattern.match(text):
            if kind in ("int", "float") and len(text) > MAX_DIGITS:
                raise ValueError(f"a number with {len(text)} digits. No setting needs more than {MAX_DIGITS}.")
            return convert(text)
    return text


def resolve(text: str, error: Callable[[str], Exception]) -> str:
    """Returns text with its references replaced by environment variables, which the output of a run masks.

    Raises:
        error(problem): a variable is not set and has no default, or the text has another `${`.
    """

    def value(found: re.Match[str]) -> str:
        name, default = found["name"], found["default"]
        if name in os.environ:
            redact.register_variable(os.environ[name])
        elif default is None:
            raise error(f"the environment has no variable {name}. Set it, or write a default: ${{env:{name}:VALUE}}.")
        return os.environ.get(name, default)

    if wrong := reference_problem(REFERENCE.sub("", text)):
        raise error(wrong)
    return REFERENCE.sub(value, text)


def reference_problem(text: str) -> str:
    """Returns why a `${` is rejected; an empty string for text without one."""
    found = re.search(r"\$\{(?:([A-Za-z_]\w*)(?=\}|\Z))?[^}]{0,60}\}?", text)
    if found is None:
        return ""
    return (
        f"{show(found[0])}: only ${{env:NAME}} and ${{env:NAME:default}} are replaced, and any other ${{ is rejected. "
        f"Write ${{env:{found[1] or 'NAME'}}}."
    )


# ---- TOML ------------------------------------------------------------------------------------------------------------

_HEADER = re.compile(r"\s*\[\s*([\w.\-]+)\s*\]")
_ENTRY = re.compile(r"\s*([\w.\-]+)\s*=")


def _parse_toml(text: str, place: Callable[[int], Location], name: str) -> Document:
    """Returns the values of TOML text. `tomllib` reports no positions: the lines of headers and bare keys are known."""
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        line = re.search(r"at line (\d+)", str(error))
        where = place(int(line[1])).where if line else name
        problem = re.sub(r" \(at .*\)$", "", str(error))
        raise ConfigError(f"{where}: not TOML: {problem}. Write `key = value`, with text in quotes.") from None
    places, section = dict[KeyPath, Location](), KeyPath()
    for number, line_text in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line_text):
            section = tuple(header[1].split("."))
        entry = _ENTRY.match(line_text)
        path = (*section, *(entry[1].split(".") if entry else ()))
        if header or entry:
            for end in range(1, len(path) + 1):
                places.setdefault(path[:end], place(number))
    references = dict[KeyPath, str]()
    origin = Origin(name=name, places=places)
    return Document(_toml_value(values, (), references, origin.where), places, references)


def _toml_value(value: Any, path: KeyPath, references: dict[KeyPath, str], where: Callable[[KeyPath], str]) -> Any:
    if len(path) >= MAX_DEPTH:
        raise ConfigError(f"{where(path[:1])}: nested more than {MAX_DEPTH} deep. Write it flatter.")
    if isinstance(value, dict):
        return {key: _toml_value(inner, (*path, key), references, where) for key, inner in value.items()}
    if isinstance(value, list):
        return [_toml_value(inner, (*path, i), references, where) for i, inner in enumerate(value)]
    if isinstance(value, (datetime.date, datetime.time)):
        return str(value)
    if isinstance(value, str) and "${" in value:
        references[path] = value
        text = resolve(value, lambda problem: ConfigError(f"{where(path)}: {problem}"))
        return plain(text) if REFERENCE.fullmatch(value) else text
    return value
