"""`Logs`: the output of each process of an attempt, `logs/attempt_k/p003/stdout.txt` and `stderr.txt` in the run."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from spmdkit.foundation import redact
from spmdkit.foundation.constants import is_step_name

MAX_QUEUED = 10_000
"""Lines that are buffered until the run reports its directory; older lines are dropped."""


class Logs:
    """Buffers lines until `open`, then writes them. Stops silently on a full disk: the terminal has the lines."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, str, str]] = deque(maxlen=MAX_QUEUED)
        self._files: dict[tuple[int, str], TextIO] = {}
        self._lock = threading.Lock()
        self.folder: Path | None = None

    def open(self, run_dir: Path, num_processes: int) -> None:
        """Creates the folder of the next attempt in a run directory, once. Does not follow links."""
        with self._lock, suppress(OSError):
            parent = run_dir / "logs"
            if self.folder is not None or parent.is_symlink():
                return
            parent.mkdir(exist_ok=True)
            numbers = [int(p.name[8:]) for p in parent.glob("attempt_*") if is_step_name(p.name[8:])]
            self.folder = parent / f"attempt_{max(numbers, default=0) + 1}"
            for process in range(num_processes):
                (self.folder / f"p{process:03}").mkdir(parents=True)
            while self._waiting:
                self._write(*self._waiting.popleft())

    def add(self, process: int, stream: str, line: str) -> None:
        """Adds one line of a process; `stream`: stdout or stderr."""
        with self._lock, suppress(OSError, ValueError):
            if self.folder is None:
                self._waiting.append((process, stream, line))
            else:
                self._write(process, stream, line)

    def _write(self, process: int, stream: str, line: str) -> None:
        assert self.folder is not None
        file = self._files.get((process, stream))
        if file is None:
            path = self.folder / f"p{process:03}" / f"{stream}.txt"
            path.parent.mkdir(exist_ok=True)  # of a process that joined later
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
            file = self._files[process, stream] = os.fdopen(
                descriptor, "w", buffering=1, encoding="utf-8", errors="replace"
            )
        file.write(f"{redact.redact_text(line)}\n")

    def close(self) -> None:
        """Closes the files."""
        with self._lock:
            for file in self._files.values():
                with suppress(OSError, ValueError):
                    file.close()
            self._files.clear()
