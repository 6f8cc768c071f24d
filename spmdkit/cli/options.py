"""Arguments of several commands: CONFIG, KEY=VALUE, and `--json`, which limits standard output to one JSON object."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from spmdkit.errors import ConfigError


def _keep_for_ourselves(requested: bool) -> bool:
    """Redirects file descriptor 1 to standard error, except for Python's own standard output.

    Gloo's C++ code prints there from several threads without a lock, so a reader could not separate its lines from the
    result. If sys.stdout is not the process's standard output (a calling program, a test), nothing is changed.
    """
    out = sys.stdout
    if requested and isinstance(out, io.TextIOWrapper) and out is sys.__stdout__:
        out.flush()
        descriptor = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = open(descriptor, "w", encoding=out.encoding, errors=out.errors)  # noqa: SIM115
    return requested


AsJson = Annotated[
    bool,
    typer.Option("--json", callback=_keep_for_ourselves, help="Print one JSON object and nothing else."),
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
