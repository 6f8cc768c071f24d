"""The rows of a comparison: a reducer and a sync each, read from the command line's `int8,powersgd(rank=4)`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmdkit.config import parameter_server, source
from spmdkit.config.problems import Location
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins

Choice = str | dict[str, Any]
_CALL = re.compile(r"([^\s(){}\[\],]+)\((.*)\)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """A reducer of gradients over replicas, and a sync."""

    reducer: Choice = "sum"
    sync: Choice = "every_step"

    @property
    def name(self) -> str:
        """The name in tables: `sum`, `int8`, `local_sgd(every=16)`, `int8, local_sgd(every=16)`."""
        parts = [choice_text(x) for x, plain in ((self.reducer, "sum"), (self.sync, "every_step")) if x != plain]
        return ", ".join(parts) or "sum"


BASELINE = Row()


def rows_of(reducers: str, syncs: str, own: Row) -> list[Row]:
    """Returns `sum` in every step, then each reducer in every step, each sync with `sum`, and the config's reducer and
    sync; without duplicates.

    Raises:
        ConfigError: an unknown kind, or options that it does not have.
    """
    requested = [Row(reducer=choice) for choice in read(reducers, "reducers")]
    requested += [Row(sync=choice) for choice in read(syncs, "syncs")]
    rows = list({row.name: row for row in (BASELINE, *requested, own)}.values())
    if len(rows) == 1:
        raise ConfigError(
            "bench communication: there is nothing to compare with sum. Name some, for example --reducers int8 "
            '--syncs "local_sgd(every=16)".'
        )
    return rows


def read(text: str, option: str) -> list[Choice]:
    """Returns the choices of `int8,powersgd(rank=4)`, or of a config's `{powersgd: {rank: 4}}`.

    Args:
        option: `reducers` or `syncs`.
    """
    choices = list[Choice]()
    for part in _parts(text, option):
        choices.append(choice := _choice(part, option))
        is_server = option == "syncs" and plugins.split(choice)[0] == parameter_server.NAME
        if not (is_server or plugins.is_reference(choice)) and (wrong := plugins.problem(option, choice)):
            raise ConfigError(f"--{option} {part}: {wrong}")
    return choices


def _choice(part: str, option: str) -> Choice:
    where = f"--{option} {part}"
    yaml = part
    if call := _CALL.fullmatch(part):
        arguments = [_named(argument) for argument in _parts(call[2], option)]
        inner = ", ".join(yaml if name is None else f"{name}: {yaml}" for name, yaml in arguments)
        is_value = len(arguments) == 1 and arguments[0][0] is None
        yaml = "{" + json.dumps(call[1]) + ": " + (inner if is_value else "{" + inner + "}") + "}"
    value = source.parse(yaml, lambda _line: Location(where, 0), where).value
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and len(value) == 1 and isinstance(next(iter(value)), str):
        return dict(value)
    raise ConfigError(f"{where}: is no name of a kind with its options. Write --{option} NAME, or NAME(OPTION=VALUE).")


def _named(argument: str) -> tuple[str | None, str]:
    """Returns (name, YAML) of `every=16`; the name is None for a value alone."""
    name, equals, value = argument.partition("=")
    return (name.strip(), value.strip()) if equals and name.strip().isidentifier() else (None, argument)


def _parts(text: str, option: str) -> list[str]:
    """Returns the parts of a text between the commas that are outside brackets."""
    depth, parts = 0, [""]
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            break
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        raise ConfigError(f"--{option} {text}: brackets do not match. Write NAME(OPTION=VALUE), separated by commas.")
    return [part for part in map(str.strip, parts) if part]


def choice_text(choice: Choice) -> str:
    """Returns a choice in the syntax of the command line: `int8`, `stale(2)`, `diloco(every=16, reducer=int8)`."""
    name, options = plugins.split(choice)
    if not isinstance(options, Mapping):
        return f"{name}({_yaml(options)})"
    inside = ", ".join(f"{key}={_yaml(value)}" for key, value in options.items())
    return f"{name}({inside})" if inside else name


def _yaml(value: Any) -> str:
    """Returns a plain value as YAML in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return value if isinstance(value, str) else json.dumps(value)
