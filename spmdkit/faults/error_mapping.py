"""What an exception that is none of ours means: a callback of the user's in a compiled step, or the file system.
Anything else is a bug."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spmdkit.errors import ExitCode
from spmdkit.foundation import files

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.EPIPE)

_CALLBACK = re.compile(
    r"(?:CpuCallback|callback)[^\n]*error calling callback|error calling callback|Python callback (?:raised|failed)",
    re.I,
)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.*)$', re.M)
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


def of_foreign(error: BaseException) -> tuple[int, str] | None:
    """Returns (exit code, message) of an exception caused by the user's code or by the machine, None where it is a bug
    of ours."""
    return of_callback(error) or _of_file_system(error)


def quiet_callbacks() -> None:
    """Keeps JAX from printing the traceback of a callback that raised. The step that contains it raises too, and
    that error is reported."""
    from spmdkit import compat

    for name in compat.CALLBACK_LOGGERS:
        logging.getLogger(name).addFilter(_no_traceback)


def _no_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and (error := record.exc_info[1]) is not None:
        for report in list(callback_raised):
            report(error)
    return not record.exc_info


callback_raised: list[Callable[[BaseException], None]] = []
"""Functions that get an exception of a callback, in the thread in which it was raised, before it appears in the
step."""


@contextlib.contextmanager
def callbacks_that_raise(report: Callable[[int, str], None], after_s: float = 3.0) -> Iterator[None]:
    """Calls `report(exit code, message)` in another thread where a callback has raised and what is in here goes on
    for so long.

    XLA's CPU devices wait in their collectives for the device with the failed callback, after 40 s abort the process
    with a C++ stack (jaxlib 0.10.2), and the thread that waits for the step does not come back before.
    """
    timers: list[threading.Timer] = []
    one_by_one = threading.Lock()  # the callbacks of several devices raise at the same time

    def start(error: BaseException) -> None:
        with one_by_one:
            if timers:
                return
            frames = traceback.extract_tb(error.__traceback__)
            own = [(frame.filename, frame.lineno, frame.name) for frame in frames if not _is_ours(frame.filename)]
            words = _callback_words(own, f"{type(error).__name__}: {error}")
            timers.append(threading.Timer(after_s, report, (ExitCode.FAILED, words)))
            timers[0].daemon = True
            timers[0].start()

    callback_raised.append(start)
    try:
        yield
    finally:
        callback_raised.remove(start)
        for timer in timers:
            timer.cancel()


def of_callback(error: BaseException) -> tuple[int, str] | None:
    """`jax.debug.callback` and its like: XLA gives the text of the traceback alone."""
    text = str(error)
    if type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError") or not _CALLBACK.search(text[:2000]):
        return None
    own = [(f["file"], f["line"], f["name"]) for f in _FRAME.finditer(text) if not _is_ours(f["file"])]
    last = [line for line in text.strip().splitlines() if line and not line.startswith((" ", "\t"))][-1]
    return ExitCode.FAILED, _callback_words(own, last)


def _callback_words(frames: Sequence[tuple[Any, ...]], last: str) -> str:
    where = " at {}:{}, in {}".format(*frames[-1]) if frames else ""
    return (
        f"a callback in the step raised{where}: {last[:500]}\nThe step that it stood in is lost, and the state that it "
        "was given with it: what is kept is the newest checkpoint. Catch it in the callback, or look there for what is "
        "wrong."
    )


def _is_ours(file: str) -> bool:
    return (
        file.startswith((files.PACKAGE, "<"))
        or _INSTALLED.search(file) is not None
        or f"{os.sep}lib{os.sep}python3" in file
    )


def _of_file_system(error: BaseException) -> tuple[int, str] | None:
    """A file that we could not use, when no better message was found; where the frame is the user's own it is their
    exception."""
    if not isinstance(error, OSError) or error.errno is None:
        return None
    frames = traceback.extract_tb(error.__traceback__)
    if error.filename is None and not any(map(_is_print, frames[-3:])):
        return None
    what = "standard output" if error.filename is None else str(error.filename)
    code = ExitCode.NOT_WRITTEN if error.errno in NO_ROOM else ExitCode.CONFIG
    return code, (
        f"{what[:300]} cannot be used: {error.strerror} (error {error.errno}). spmdkit has to read and write the files "
        "that it is given. Fix the permissions, free some room, or name another."
    )


def _is_print(frame: traceback.FrameSummary) -> bool:
    return "print(" in (frame.line or "") or "flush" in (frame.line or "")
