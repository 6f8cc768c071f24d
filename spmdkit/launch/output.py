"""Copies the output of the processes to the launcher's output, line by line, after the process number."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import IO, TextIO

from spmdkit.launch.logs import Logs

TAIL_LINES = 20

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
        for reader in self._readers:
            reader.join(timeout=1.0)


def _copy(
    source: IO[bytes],
    target: TextIO | None,
    prefix: str,
    lock: threading.Lock,
    log: Callable[[str], None],
    tail: deque[str] | None,
) -> None:
    with source:
        for raw in source:
            line = without_greeting(raw.decode(errors="replace").rstrip("\r\n"))
            if line is None:
                continue
            log(line)
            if tail is not None:
                tail.append(line)
            try:
                if target is not None:
                    with lock:
                        target.write(f"{prefix}{line}\n")
                        target.flush()
            except (OSError, ValueError):
                target = None  # the launcher's reader has exited; the child must still not block on a full pipe
