"""`Logs`: the output of each process of an attempt, `logs/attempt_k/p003/stdout.txt` and `stderr.txt` in the run.

A file has at most `log.max_mb` million bytes; the output continues in `stdout.1.txt`, `stdout.2.txt` ... at the end of
a line. The first file and the newest `log.backups` are retained.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import deque
from contextlib import suppress
from io import FileIO
from pathlib import Path

from spmdkit.foundation import files, redact
from spmdkit.foundation.constants import is_step_name

MAX_QUEUED = 2**25
"""Characters that are buffered until the run reports its directory; older lines are dropped."""
MAX_MB, BACKUPS = 200.0, 3
"""Defaults of `log.max_mb` and `log.backups`, until the run's config is known."""


@dataclasses.dataclass
class _Stream:
    """The current file of one stream, its size in bytes and its number."""

    folder: Path
    name: str
    file: FileIO
    size: int = 0
    number: int = 0

    def path(self, number: int) -> Path:
        return self.folder / f"{self.name}{f'.{number}' if number else ''}.txt"


class Logs:
    """Buffers lines until `open`, then writes them. Stops silently on a full disk: the terminal has the lines."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, str, str]] = deque()
        self._num_waiting = 0
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._lock = threading.Lock()
        self._max_bytes, self._backups = int(MAX_MB * 1e6), BACKUPS
        self.folder: Path | None = None

    def open(self, run_dir: Path, num_processes: int) -> None:
        """Creates the folder of the next attempt in a run directory, once. Does not follow links."""
        with self._lock, suppress(OSError):
            parent = run_dir / "logs"
            if self.folder is not None or parent.is_symlink():
                return
            self._max_bytes, self._backups = _limits(run_dir)
            parent.mkdir(exist_ok=True)
            numbers = [int(p.name[8:]) for p in parent.glob("attempt_*") if is_step_name(p.name[8:])]
            self.folder = parent / f"attempt_{max(numbers, default=0) + 1}"
            for process in range(num_processes):
                (self.folder / f"p{process:03}").mkdir(parents=True)
            while self._waiting:
                self._write(*self._waiting.popleft())

    def add(self, process: int, stream: str, lines: str) -> None:
        """Adds complete lines of a process; `stream`: stdout or stderr."""
        lines = redact.redact_lines(lines)
        with self._lock, suppress(OSError, ValueError):
            if self.folder is None:
                self._waiting.append((process, stream, lines))
                self._num_waiting += len(lines)
                while self._num_waiting > MAX_QUEUED:
                    self._num_waiting -= len(self._waiting.popleft()[2])
            else:
                self._write(process, stream, lines)

    def _write(self, process: int, stream: str, lines: str) -> None:
        assert self.folder is not None
        content = lines.encode("utf-8", errors="replace")
        to = self._streams.get((process, stream))
        if to is None:
            folder = self.folder / f"p{process:03}"
            folder.mkdir(exist_ok=True)  # of a process that joined later
            to = self._streams[process, stream] = _Stream(folder, stream, _created(folder / f"{stream}.txt"))
        while self._max_bytes and to.size + len(content) > self._max_bytes:
            fits = content.rfind(b"\n", 0, max(0, self._max_bytes - to.size)) + 1
            if not fits and not to.size:  # one line that is longer than a file
                fits = content.find(b"\n") + 1
            to.size += to.file.write(content[:fits])
            content = content[fits:]
            if not content:
                return
            self._rotate(to)
        to.size += to.file.write(content)

    def _rotate(self, stream: _Stream) -> None:
        stream.file.close()
        stream.number += 1
        stream.file, stream.size = _created(stream.path(stream.number)), 0
        if (old := stream.number - self._backups) > 0:
            stream.path(old).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the files."""
        with self._lock:
            for stream in self._streams.values():
                with suppress(OSError):
                    stream.file.close()
            self._streams.clear()


def _created(path: Path) -> FileIO:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    return FileIO(descriptor, "w")


def _limits(run_dir: Path) -> tuple[int, int]:
    """Returns the `log.max_mb` in bytes (0: no limit) and the `log.backups` of the run's config."""
    import yaml  # takes 20 ms

    try:
        log = yaml.safe_load(files.read_regular(run_dir / "config.yaml", 2**20))["log"]
        return int(1e6 * (log["max_mb"] or 0)), int(log["backups"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError, RecursionError):
        return int(MAX_MB * 1e6), BACKUPS
