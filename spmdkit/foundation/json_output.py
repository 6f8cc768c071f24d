"""Standard output of a command with `--json`: one JSON object. All other output goes to standard error."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

_reserved: list[TextIO] = []


def reserve_stdout() -> Callable[[], None]:
    """Redirects standard output to standard error, except for `print_json`. Returns the function that ends this.

    User code prints there by `print`, and Gloo's C++ code by file descriptor 1, from several threads without a lock. If
    sys.stdout is not the process's standard output (a calling program, a test), the descriptor is not redirected.
    """
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out is sys.__stdout__:
        out.flush()
        descriptor = os.dup(1)
        os.dup2(2, 1)
        out = open(descriptor, "w", encoding=out.encoding, errors=out.errors)  # noqa: SIM115
    _reserved.append(out)
    sys.stdout = sys.stderr

    def release() -> None:
        sys.stdout = _reserved.pop()

    return release


def print_json(document: Any) -> None:
    """Prints the result of a command."""
    print(json.dumps(document), file=_reserved[-1] if _reserved else None, flush=True)
