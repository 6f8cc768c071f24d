"""What is compared: a reducer and a sync each, read from the command line's `int8,powersgd(rank=4)`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spmdkit.config import parameter_server, source
from spmdkit.config.problems import Location
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins

Choice = str | dict[str, Any]
BASELINES = {"reducers": "sum", "syncs": "every_step"}
"""Option, which is a group of plug-ins -> the plug-in that the others are compared with."""

_CALL = re.compile(r"([^\s(){}\[\],]+)\((.*)\)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One way of adding gradients over replicas, and one of agreeing."""

    reducer: Choice = "sum"
    sync: Choice = "every_step"

    @property
    def name(self) -> str:
        """How tables call it: `sum`, `int8`, `local_sgd(every=16)`, `int8, local_sgd(every=16)`."""
        parts = [choice_text(x) for x, plain in ((self.reducer, "sum"), (self.sync, "every_step")) if x != plain]
        return ", ".join(parts) or "sum"


BASELINE = Row()


def rows_of(reducers: str, syncs: str, own: Row) -> list[Row]:
    """Returns `sum` in every step, then each reducer in every step, each sync with `sum`, and what the config itself
    has; each once.

    Raises:
        ConfigError: there is no such kind, or the options are not its.
    """
    requested = [Row(reducer=choice) for choice in read(reducers, "reducers")]
    requested += [Row(sync=choice) for choice in read(syncs, "syncs")]
    rows = list[Row]()
    for row in (BASELINE, *requested, own):
        if row not in rows:
            rows.append(row)
    if len(rows) == 1:
        raise ConfigError(
            "bench communication: there is nothing to compare with sum. Name some, for example --reducers int8 "
            '--syncs "local_sgd(every=16)".'
        )
    return rows


def read(text: str, option: str) -> list[Choice]:
    """Returns the choices of `int8,powersgd(rank=4)`; what a config has, `{powersgd: {rank: 4}}`, is read too.

    Args:
        option: `reducers` or `syncs`.
    """
    found = list[Choice]()
    for part in _parts(text, option):
        choice = _choice(part, option)
        known = plugins.is_reference(choice) or (
            option == "syncs" and plugins.split(choice)[0] == parameter_server.NAME
        )
        if not known and (wrong := plugins.problem(option, choice)):
            raise ConfigError(f"--{option} {part}: {wrong}")
        found.append(choice)
    return found


def _choice(part: str, option: str) -> Choice:
    where = f"--{option} {part}"
    yaml = part
    if call := _CALL.fullmatch(part):
        arguments = [_named(argument, where) for argument in _parts(call[2], option)]
        values = [yaml for name, yaml in arguments if name is None]
        several = len(arguments) != 1 or not values
        inner = "{" + ", ".join(f"{name}: {yaml}" for name, yaml in arguments) + "}" if several else values[0]
        yaml = "{" + f"{json.dumps(call[1])}: {inner}" + "}"
    value = source.parse(yaml, lambda _line: Location(where, 0), where).value
    if isinstance(value, str) or (
        isinstance(value, Mapping) and len(value) == 1 and isinstance(next(iter(value)), str)
    ):
        return value if isinstance(value, str) else dict(value)
    raise ConfigError(f"{where}: is no name of a kind with its options. Write --{option} NAME, or NAME(OPTION=VALUE).")


def _named(argument: str, where: str) -> tuple[str | None, str]:
    """Returns (name, YAML) of `every=16`; no name of a value alone."""
    name, equals, value = argument.partition("=")
    return (name.strip(), value.strip()) if equals and name.strip().isidentifier() else (None, argument)


def _parts(text: str, option: str) -> list[str]:
    """Returns what stands between the commas that are in no brackets."""
    return [part for part in (x.strip() for x in _cut(text, option)) if part]


def _cut(text: str, option: str) -> Iterator[str]:
    depth, begun = 0, 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            break
        if character == "," and depth == 0:
            yield text[begun:at]
            begun = at + 1
    if depth:
        raise ConfigError(f"--{option} {text}: brackets do not match. Write NAME(OPTION=VALUE), separated by commas.")
    yield text[begun:]


def choice_text(choice: Choice) -> str:
    """Returns a choice as the command line writes it: `int8`, `stale(2)`, `diloco(every=16, reducer=int8)`."""
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
