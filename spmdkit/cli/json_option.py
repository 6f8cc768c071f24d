"""`AsJson`, the option `--json` of every command that has it: standard output then carries one JSON object and nothing
else."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer


def _keep_for_ourselves(asked: bool) -> bool:
    """Standard output becomes Python's alone; what libraries of C++ write to file descriptor 1 comes out on standard
    error.

    Gloo greets there, several threads at once and without a lock, so that no reader could tell its lines from ours.
    Where sys.stdout is not the process's own (another program calls us, a test) nothing is done.
    """
    out = sys.stdout
    if asked and isinstance(out, io.TextIOWrapper) and out is sys.__stdout__:
        out.flush()
        ours = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = open(ours, "w", encoding=out.encoding, errors=out.errors)  # noqa: SIM115
    return asked


AsJson = Annotated[
    bool,
    typer.Option("--json", callback=_keep_for_ourselves, help="Print one JSON object and nothing else."),
]
