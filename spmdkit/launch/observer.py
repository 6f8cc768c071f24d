"""`JobObserver`: who looks on while a launcher's processes run, from inside of its loop, twenty times a second: a
drill, which hurts them on order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from spmdkit.launch.supervisor import Child


class JobObserver(Protocol):
    """Called by one launcher, in its main thread; what it does there holds up the launcher."""

    @property
    def addresses(self) -> tuple[str, str]:
        """Returns where process 0 listens, and where the launcher and what it keeps do."""
        ...

    def host(self, process: int) -> AbstractContextManager[None]:
        """Returns within what a process is started."""
        ...

    def given(self, process: int) -> tuple[Mapping[str, str], Sequence[int]]:
        """Returns variables and open descriptors that a process also gets. Called for each process of
        each attempt."""
        ...

    def look(self, children: Sequence[Child]) -> None:
        """Looks at the processes of an attempt."""
        ...

    def ended(self, children: Sequence[Child], stop_signal: int | None) -> None:
        """Called when an attempt has ended and all its processes are gone; `stop_signal`: the signal that the launcher
        was sent meanwhile."""
        ...
