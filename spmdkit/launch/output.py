"""Copies the output of the processes to the launcher's output, in whole lines, after the process number.

A read returns what a process has written so far, so a line is shown immediately, and many lines are handled together.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import IO, TextIO

from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.timeouts import OUTPUT_DRAIN_S
from spmdkit.launch.logs import Logs

TAIL_LINES = 20
PIPE_BYTES, BLOCK_BYTES = 2**20, 2**16
MAX_LINE_BYTES = 2**24
CARRIAGE_RETURNS = re.compile("\r+\n")

GREETING = re.compile(
    r"\[Gloo\] Rank (\[Gloo\] Rank |\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : )*"  # noqa: E501
)
"""Text that Gloo prints on standard output for every process group; not for users. Its threads write at the same time,
so the texts interleave, and the process's next output may follow a partial one."""


def without_greeting(line: str) -> str | None:
    """Returns the line without Gloo's text at its beginning; None if nothing remains."""
    match = GREETING.match(line)
    return line if match is None else line[match.end() :] or None


class Output:
    """Two threads that copy one process's lines to the launcher's output and the logs. `tail`: end of its stderr."""

    def __init__(
        self, process: int, popen: subprocess.Popen[bytes], lock: threading.Lock, logs: Logs, shown: bool = True
    ):
        assert popen.stdout is not None and popen.stderr is not None
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        streams = ((popen.stdout, sys.stdout, "stdout"), (popen.stderr, sys.stderr, "stderr"))
        self._readers = []
        for source, target, name in streams:
            tail = self.tail if name == "stderr" else None
            log = partial(logs.add, process, name)
            arguments = (source, target if shown else None, f"[{process}] ", lock, log, tail)
            self._readers.append(threading.Thread(target=_copy, args=arguments, daemon=True))
            self._readers[-1].start()

    def drain(self) -> None:
        """Waits until the last lines of an exited process are copied."""
        deadline = Deadline(OUTPUT_DRAIN_S)
        for reader in self._readers:
            reader.join(deadline.remaining_s)


def _copy(
    source: IO[bytes],
    target: TextIO | None,
    prefix: str,
    lock: threading.Lock,
    log: Callable[[str], None],
    tail: deque[str] | None,
) -> None:
    with source, suppress(OSError):
        _enlarge(source.fileno())
        for block in _whole_lines(source.fileno()):
            lines = _shown(block.decode(errors="replace"))
            if not lines:
                continue
            log(lines)
            if tail is not None:
                tail.extend(lines[:-1].rsplit("\n", TAIL_LINES)[-TAIL_LINES:])
            if target is None:
                continue
            try:
                with lock:
                    target.write(prefix + lines[:-1].replace("\n", f"\n{prefix}") + "\n")
                    target.flush()
            except (OSError, ValueError):
                target = None  # the launcher's reader has exited; the child must still not block on a full pipe


def _enlarge(pipe: int) -> None:
    """Sets the size of a pipe, so that a process that writes much does not wait for each read (Linux)."""
    with suppress(OSError, AttributeError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def _whole_lines(descriptor: int) -> Iterator[bytes]:
    """Yields the content of a pipe in blocks that end with a line. A line that exceeds `MAX_LINE_BYTES` is divided."""
    parts, size = list[bytes](), 0
    buffer = bytearray(BLOCK_BYTES)  # one for each read fragments glibc's heap: 0.2 KB per line (2026-11-28)
    while count := os.readv(descriptor, [buffer]):
        block = bytes(memoryview(buffer)[:count])
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join((*parts, block[:end]))
            parts, size = [], 0
        parts.append(block[end:])
        size += len(block) - end
        if size > MAX_LINE_BYTES:
            yield b"".join((*parts, b"\n"))
            parts, size = [], 0
    if size:
        yield b"".join((*parts, b"\n"))


def _shown(lines: str) -> str:
    """Returns complete lines without carriage returns at their ends and without Gloo's text."""
    if "\r" in lines:
        lines = CARRIAGE_RETURNS.sub("\n", lines)
    if "[Gloo]" not in lines:
        return lines
    kept = (without_greeting(line) for line in lines[:-1].split("\n"))
    return "".join(f"{line}\n" for line in kept if line is not None)
