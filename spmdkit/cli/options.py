"""Arguments of several commands: CONFIG, KEY=VALUE, and `--json`, which limits standard output to one JSON object."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from spmdkit.errors import ConfigError
from spmdkit.foundation.json_output import reserve_stdout


def _reserve_stdout(context: typer.Context, requested: bool) -> bool:
    if requested:
        context.call_on_close(reserve_stdout())
    return requested


AsJson = Annotated[
    bool,
    typer.Option("--json", callback=_reserve_stdout, help="Print one JSON object and nothing else."),
]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="Config file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides with dotted keys.", show_default=False)
]


class Commands(typer.core.TyperGroup):
    """A group of commands that refuses `--steps 5` with the form of an override, `steps=5`."""

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        """Returns (name, command, the arguments after it)."""
        name, command, rest = super().resolve_command(context, args)
        parameters = [] if command is None else command.params
        if any(p.name == "overrides" for p in parameters):
            known = {flag for p in parameters for flag in p.opts}
            for word, after in itertools.pairwise([*rest, ""]):
                flag, equals, value = word.partition("=")
                key = flag[2:].replace("-", "_")
                if word == "--" or not flag.startswith("--") or flag in known:
                    continue
                from spmdkit.config.settings import Settings

                if key.split(".")[0] in Settings.model_fields:
                    value = value if equals else after if not after.startswith("-") else "..."
                    context.fail(f"No such option: {flag}. Settings of a config are set as {key}={value or '...'}")
        return name, command, rest


def one_state(step: int | None, best: bool, initial: bool, command: str) -> None:
    """Raises ConfigError if more than one of `--step`, `--best` and `--initial` is given."""
    flags = [f"--step {step}"] * (step is not None) + ["--best"] * best + ["--initial"] * initial
    if len(flags) > 1:
        raise ConfigError(f"{command} has {' and '.join(flags)}. Each selects a state. Omit one.")
