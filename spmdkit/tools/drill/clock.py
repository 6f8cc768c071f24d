"""`Clocks`: the wall clock of each process of a job, shifted while the process runs. The machine's clock stays.

A library that shadows the functions of libc (clock.c) is compiled with gcc and loaded by LD_PRELOAD. It reads the shift
from a file, so a forked process, which loads no library, keeps its clock.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from spmdkit.foundation.timeouts import CLOCK_LIBRARY_S

SOURCE = Path(__file__).with_name("clock.c")


def missing_compiler() -> str:
    """Returns why the clock of a process cannot be shifted; empty if it can."""
    return "" if shutil.which("gcc") else "gcc is not installed: the clock of a process is set by a library in C"


def compile_library(path: Path) -> None:
    """Compiles the library. Raises subprocess.SubprocessError."""
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=CLOCK_LIBRARY_S)


class Clocks:
    """The clocks of `num_processes` processes; of none without a compiler. `close` removes the files."""

    def __init__(self, num_processes: int):
        self._folder: Path | None = None
        if num_processes and not missing_compiler():
            self._folder = Path(tempfile.mkdtemp(prefix="spmdkit-clock-"))
            compile_library(self._folder / "clock.so")

    def variables(self, process: int) -> dict[str, str]:
        """Returns the environment variables of a process."""
        if self._folder is None:
            return {}
        preloaded = os.environ.get("LD_PRELOAD", "").split()
        libraries = " ".join([*preloaded, str(self._folder / "clock.so")])
        return {"LD_PRELOAD": libraries, "SPMDKIT_CLOCK_FILE": str(self._folder / str(process))}

    def set(self, process: int, seconds: int) -> str:
        """Shifts the clock of a process; returns why that is impossible, or an empty text."""
        if self._folder is None:
            return missing_compiler()
        (self._folder / str(process)).write_text(str(seconds))
        return ""

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
