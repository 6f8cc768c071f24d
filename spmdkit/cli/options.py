"""Arguments of several commands: CONFIG, KEY=VALUE, and `--json`, which limits standard output to one JSON object."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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


def one_state(step: int | None, best: bool, initial: bool, command: str) -> None:
    """Raises ConfigError if more than one of `--step`, `--best` and `--initial` is given."""
    flags = [f"--step {step}"] * (step is not None) + ["--best"] * best + ["--initial"] * initial
    if len(flags) > 1:
        raise ConfigError(f"{command} has {' and '.join(flags)}. Each selects a state. Omit one.")
