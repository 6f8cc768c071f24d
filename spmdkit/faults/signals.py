"""`StopSignals`: signals that stop a run. The first requests a save and the exit; Ctrl-C after it exits immediately.

| signal                               | before the loop           | in the loop                          |
| ------------------------------------ | ------------------------- | ------------------------------------ |
| SIGINT, SIGTERM, SIGHUP, SIGUSR1     | exits: nothing is unsaved | finishes this step, saves, exits: 42 |
| SIGINT after one of these            | 130, immediately          | 130, immediately                     |
| SIGQUIT (faults/stacks.py)           | prints all stacks         | prints all stacks                    |

Python runs a signal handler between two bytecodes of the main thread, never while that thread waits in a collective. A
separate thread therefore reads the signal number from Python's wakeup descriptor, which the C handler writes.
`jax.distributed.initialize` installs a C handler that swallows SIGTERM: call `reinstall` after `join`. Signals that are
ignored at startup (SIGHUP under `nohup`) stay ignored.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from spmdkit.errors import ExitCode
from spmdkit.foundation.timeouts import EXIT_GRACE_S

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
NOTICE = "stopping after this step and saving; press Ctrl-C again to exit immediately"
FORCED_EXIT = 130


class ExitRequested(BaseException):
    """A signal arrived before there was anything to save. `except Exception` in a user's module does not catch it."""

    exit_code = ExitCode.PREEMPTED

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name} before the first step; nothing is lost")


class StopSignals:
    """Context manager; `.requested` is None or the number of the first signal. Does nothing outside the main thread.

    `announce=False` omits the notice, so that one of many processes prints it. The second Ctrl-C calls `force_exit`.
    """

    def __init__(self, announce: bool = True, force_exit: Callable[[int], Any] = os._exit):
        self.requested: int | None = None
        self.announce, self._force_exit = announce, force_exit
        self.on_request: Callable[[int], Any] | None = None  # called with the first signal, in a separate thread
        self._restore: list[Callable[[], Any]] = []
        self._exit_process: Callable[[BaseException], Any] | None = None  # set while nothing is unsaved
        self._started = False

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        thread = threading.Thread(target=self._watch, args=(reader,), name="spmdkit-signals", daemon=True)
        thread.start()
        previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._installed = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, self._in_main_thread) for number in self._installed}
        for number, handler in previous.items():
            self._restore.append(partial(signal.signal, number, signal.SIG_DFL if handler is None else handler))
        self._restore += [partial(signal.set_wakeup_fd, previous_fd), writer.close, thread.join, reader.close]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for undo in self._restore:  # handlers first, so that nothing is written to a closed descriptor
            undo()
        self._restore.clear()

    def reinstall(self) -> None:
        """Reinstalls the handlers after other code has replaced them."""
        if self._restore and threading.current_thread() is threading.main_thread():
            for number in self._installed:
                signal.signal(number, self._in_main_thread)

    @contextmanager
    def raise_on_signal(
        self, exit_process: Callable[[BaseException], Any], run_is_open: bool = False
    ) -> Iterator[None]:
        """While the body runs, a signal ends it by an exception. If the body does not end in time,
        `exit_process(exception)` is called. `run_is_open`: Ctrl-C requests a stop, as in the loop; otherwise it is a
        plain KeyboardInterrupt."""
        self._exit_process, self._started = exit_process, run_is_open
        try:
            if self.requested is not None:
                raise self._raised(self.requested)
            yield
        finally:
            self._exit_process = None

    def _raised(self, number: int) -> BaseException:
        return KeyboardInterrupt() if number == signal.SIGINT and not self._started else ExitRequested(number)

    def received(self, number: int) -> None:
        """Records one signal: the first is a stop request, SIGINT after a request exits immediately with 130."""
        if number not in SIGNALS:
            return
        if self.requested is not None:
            if number == signal.SIGINT:
                self._force_exit(FORCED_EXIT)
            return
        self.requested = number
        if self._exit_process is not None:
            timer = threading.Timer(EXIT_GRACE_S, self._exit_unsaved, (number,))
            timer.daemon = True
            timer.start()
            return
        if self.announce:
            try:
                print(NOTICE, file=sys.stderr, flush=True)
            except OSError:
                self.announce = False  # the terminal is gone; the request remains
        if self.on_request is not None:
            threading.Thread(target=self.on_request, args=(number,), name="spmdkit-stop", daemon=True).start()

    def _exit_unsaved(self, number: int) -> None:
        if (exit_process := self._exit_process) is not None:
            exit_process(self._raised(number))

    def _watch(self, reader: socket.socket) -> None:
        while numbers := reader.recv(64):  # empty when the writer is closed
            for number in numbers:
                self.received(number)

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        """Python writes only signals with a Python handler to the wakeup descriptor, so this handler must exist."""
        if self._exit_process is not None:
            raise self._raised(number)
