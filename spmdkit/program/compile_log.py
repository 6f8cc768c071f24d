"""Captures the output of XLA on stderr during compilation: it reports the partitioner's warnings only as log lines.

The most important one is "[SPMD] Involuntary full rematerialization": the partitioner cannot convert between two
shardings and gathers an array on every device. C++ writes the lines to file descriptor 2, so they are read there. All
output is forwarded to the stream immediately, even if the process crashes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

MARK = b"ematerialization"
END = b"\0"
"""Written at the end of the block."""
MAX_LINES = 64
MAX_BYTES = 4096
"""Maximum line length, which bounds memory if the compiler's output has no line breaks."""


@contextlib.contextmanager
def capture() -> Iterator[list[str]]:
    """Yields a list that contains, after the block, the lines about rematerialization logged during the block.

    If the stream cannot be duplicated (closed, no descriptor), the list stays empty: logging must not fail a run.
    """
    lines: list[str] = []
    try:
        sys.stderr.flush()
        real = os.dup(2)
    except (OSError, ValueError, AttributeError):
        yield lines
        return
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    ended = threading.Event()
    args = (reader, real, lines, ended)
    threading.Thread(target=_forward, args=args, daemon=True, name="compile-log").start()
    try:
        yield lines
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(real, 2)
        os.write(writer, END)
        os.close(writer)
        ended.wait(timeout=10)


def _forward(reader: int, real: int, lines: list[str], ended: threading.Event) -> None:
    """Forwards the output to the end of the pipe: a process that was started during the block may write longer."""
    rest = b""
    with os.fdopen(reader, "rb", buffering=0) as stream:
        while chunk := stream.read(65536):
            is_end, chunk = END in chunk, chunk.replace(END, b"")
            with contextlib.suppress(OSError):
                os.write(real, chunk)
            *whole, rest = (rest + chunk).split(b"\n")
            rest = rest[-MAX_BYTES:]
            for line in whole:
                if MARK in line and len(lines) < MAX_LINES and not ended.is_set():
                    lines.append(line[:MAX_BYTES].decode(errors="replace"))
            if is_end:
                ended.set()
    os.close(real)
