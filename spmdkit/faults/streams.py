"""A command survives closed standard output and error: `| head`, a closed terminal, `>&-`.

A descriptor that is closed at startup is opened on /dev/null; otherwise the next file or socket would get its number.
If the reader exits later, the first write that fails redirects the descriptor to /dev/null.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

GONE = (errno.EPIPE, errno.EIO)
"""No reader; a closed terminal."""


FULL = (errno.ENOSPC, errno.EDQUOT)


class Outlet(io.FileIO):
    """A descriptor that is redirected to /dev/null when its reader has exited."""

    ends_nothing: tuple[int, ...] = GONE

    def write(self, data: Any) -> int:
        """Returns the number of bytes written; all of them if the stream is closed."""
        try:
            written = super().write(data)
        except OSError as error:
            if error.errno not in self.ends_nothing:
                raise
            redirect_to_null(self.fileno())
            written = None
        return len(memoryview(data).cast("B")) if written is None else written


def ignore_closed_outputs(when_full: bool = False) -> None:
    """Lets this process continue when the readers of its output have exited. Called once, before anything is opened or
    printed; `when_full`: also when the disk of its output is full."""
    Outlet.ends_nothing = GONE + FULL * when_full
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            redirect_to_null(descriptor)
    sys.stdout, sys.stderr = _outlet(sys.stdout, 1), _outlet(sys.stderr, 2)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]


def redirect_to_null(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _outlet(stream: Any, descriptor: int) -> Any:
    if stream is not None:
        if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != descriptor:
            return stream  # user code has replaced it
        stream.flush()
    lines = stream is None or stream.line_buffering
    return io.TextIOWrapper(
        io.BufferedWriter(Outlet(descriptor, "w", closefd=False)),
        encoding="utf-8" if stream is None else stream.encoding,
        errors="backslashreplace" if descriptor == 2 or stream is None else stream.errors,
        line_buffering=lines,
        write_through=stream is not None and stream.write_through,
    )
