"""`Precompile`: fills the compilation cache for other numbers of processes while the job trains.

For each size in sequence, it starts a job of that many processes with the same config, at the lowest priority, up to
the compilation of the step. These are real processes, since XLA's cache key includes the devices and their topology.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from spmdkit.foundation.constants import COMPILE_ONLY
from spmdkit.launch.process import print_line, start

NICENESS = 19
"""The lowest priority of `nice`."""


class Precompile:
    """The compile-only jobs of one launcher.

    Args:
        sizes: number of processes -> additional arguments of the command.
        train: the arguments of `train CONFIG KEY=VALUE...`.
    """

    def __init__(
        self,
        sizes: Mapping[int, Sequence[str]],
        train: Sequence[str],
        devices_per_process: int | None,
        env: Mapping[str, str] = os.environ,
    ):
        self._left, self._train, self._devices, self._env = dict(sizes), list(train), devices_per_process, env
        self._running: subprocess.Popen[Any] | None = None
        self._size = 0

    def poll(self) -> None:
        """Starts the next job when the previous one has ended. Called regularly while the job trains."""
        if self._running is not None:
            if self._running.poll() is None:
                return
            if code := self._running.returncode:
                message = f"compiling ahead for {self._size} processes has failed with {code}"
                print_line(f"{message}: such a generation compiles itself")
            self._running = None
        if self._left:
            self._size, arguments = self._left.popitem()
            streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            env = {**self._env, COMPILE_ONLY: "1"}
            self._running = start(self.command(self._size, arguments), env, **streams, start_new_session=True)

    def command(self, size: int, more: Sequence[str]) -> list[str]:
        """Returns the command of the job of one size."""
        launch = ["nice", "-n", str(NICENESS), sys.executable, "-m", "spmdkit", "launch", "-n", str(size)]
        if self._devices is not None:
            launch += ["--devices-per-process", str(self._devices)]
        return [*launch, "--", *self._train, *more]

    def end(self) -> None:
        """Ends the running job; its processes die with it."""
        if self._running is not None:
            self._running.kill()
            self._running.wait()
            self._running = None
