"""`StopSignals`: the first SIGINT or SIGTERM asks the run to stop after a save, Ctrl-C after that leaves at once.

Python runs a signal's handler between two bytecodes of the main thread, so a main thread that waits inside a
collective for ever never gets there, and a second Ctrl-C would do nothing. The signal's number is therefore read from
Python's wakeup descriptor, which the C handler writes itself, by a thread of its own.

Enter it after `join`: `jax.distributed.initialize` installs a C handler that swallows SIGTERM; the last one to install
wins.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = "stopping after this step and saving; press Ctrl-C again to leave at once"
LEFT_AT_ONCE = 130


class StopSignals:
    """Context manager; `.requested` is None or the number of the first signal. Outside the main thread it does nothing.

    `announce=False` keeps the notice to one process of many. `leave` is what the second Ctrl-C calls.
    """

    def __init__(self, announce: bool = True, leave: Callable[[int], Any] = os._exit):
        self.requested: int | None = None
        self._announce, self._leave = announce, leave
        self._restore: list[Callable[[], Any]] = []

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        thread = threading.Thread(target=self._watch, args=(reader,), name="spmdkit-signals", daemon=True)
        thread.start()
        previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        previous = {number: signal.signal(number, _handled_by_the_thread) for number in SIGNALS}
        for number, handler in previous.items():
            self._restore.append(partial(signal.signal, number, signal.SIG_DFL if handler is None else handler))
        self._restore += [partial(signal.set_wakeup_fd, previous_fd), writer.close, thread.join, reader.close]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for undo in self._restore:  # handlers first, so that nothing is written to a closed descriptor
            undo()
        self._restore.clear()

    def received(self, number: int) -> None:
        """Takes note of one signal: the first is a request, SIGINT after a request leaves at once with 130."""
        if number not in SIGNALS:
            return
        if self.requested is not None:
            if number == signal.SIGINT:
                self._leave(LEFT_AT_ONCE)
            return
        self.requested = number
        if self._announce:
            try:
                print(NOTICE, file=sys.stderr, flush=True)
            except OSError:
                self._announce = False  # the terminal is gone; the request stands

    def _watch(self, reader: socket.socket) -> None:
        while numbers := reader.recv(64):  # empty when the writer is closed
            for number in numbers:
                self.received(number)


def _handled_by_the_thread(number: int, frame: FrameType | None) -> None:
    """Only a signal with a Python handler is written to the wakeup descriptor, so there has to be one."""
