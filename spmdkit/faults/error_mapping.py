"""Maps exceptions from outside spmdkit to exit codes: a user's callback in a compiled step, or the file system."""

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

from spmdkit.errors import ExitCode, is_runtime
from spmdkit.foundation.exhausted_memory import is_exhausted
from spmdkit.foundation.files import NO_ROOM
from spmdkit.foundation.formatting import format_bytes

NOT_WRITTEN = (*NO_ROOM, errno.EROFS, errno.EPIPE)

_CALLBACK = re.compile(
    r"(?:CpuCallback|callback)[^\n]*error calling callback|error calling callback|Python callback (?:raised|failed)",
    re.I,
)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.*)$', re.M)


def describe_external(error: BaseException) -> tuple[int, str] | None:
    """Returns (exit code, message) of an exception from user code or the machine, None for a bug in spmdkit."""
    return describe_callback(error) or describe_out_of_memory(error) or _describe_os_error(error)


def quiet_callbacks() -> None:
    """Prevents JAX from printing the traceback of a callback that raised: the step raises too."""
    from spmdkit import compat

    for name in compat.CALLBACK_LOGGERS:
        logging.getLogger(name).addFilter(_no_traceback)


def _no_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and (error := record.exc_info[1]) is not None:
        for report in list(callback_raised):
            report(error)
    return not record.exc_info


callback_raised: list[Callable[[BaseException], None]] = []
"""Functions that receive an exception of a callback, in the thread that raised it, before the step raises it."""


@contextlib.contextmanager
def callbacks_that_raise(report: Callable[[int, str], None], after_s: float = 3.0) -> Iterator[None]:
    """Calls `report(exit code, message)` in another thread if a callback has raised and the body continues.

    XLA's CPU devices wait in their collectives for the device with the failed callback. After 40 s they abort the
    process with a C++ stack (jaxlib 0.10.2).
    """
    timers: list[threading.Timer] = []
    one_by_one = threading.Lock()  # the callbacks of several devices raise concurrently

    def start(error: BaseException) -> None:
        with one_by_one:
            if timers:
                return
            frames = traceback.extract_tb(error.__traceback__)
            user_frames = [(f.filename, f.lineno, f.name) for f in frames if not is_runtime(f.filename)]
            words = _callback_words(user_frames, f"{type(error).__name__}: {error}")
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


def describe_callback(error: BaseException) -> tuple[int, str] | None:
    """`jax.debug.callback` and similar functions: XLA reports only the text of the traceback."""
    text = str(error)
    if type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError") or not _CALLBACK.search(text[:2000]):
        return None
    user_frames = [(f["file"], f["line"], f["name"]) for f in _FRAME.finditer(text) if not is_runtime(f["file"])]
    last_line = [line for line in text.strip().splitlines() if line and not line.startswith((" ", "\t"))][-1]
    return ExitCode.FAILED, _callback_words(user_frames, last_line)


def _callback_words(frames: Sequence[tuple[Any, ...]], last: str) -> str:
    where = " at {}:{}, in {}".format(*frames[-1]) if frames else ""
    return (
        f"a callback in the step raised{where}: {last[:500]}\nThe step and its state are lost; the run resumes "
        "from the newest checkpoint. Fix the callback, or catch the exception in it."
    )


def describe_out_of_memory(error: BaseException) -> tuple[int, str] | None:
    """A device, or this process, without memory: a program other than the step, or a step that a user's script runs.
    `plan.fit_check.out_of_memory` describes the step of a run."""
    if not is_exhausted(error):
        return None
    return ExitCode.FAILED, (
        f"{exhausted_memory(error)}\n"
        "The state, a batch and everything that a step computes have to fit into the memory of each device. Lower "
        "batch_size, set microbatches or remat, or shard over more devices (mesh.fsdp). spmdkit plan CONFIG shows what "
        "a step needs."
    )


def exhausted_memory(error: BaseException) -> str:
    """Returns the first sentence about an exception of exhausted memory: the requested bytes, and JAX's text."""
    text = str(error)
    size = re.search(r"(\d+) bytes", text)
    needed = f": {format_bytes(int(size[1]))} more are needed" if size else ""
    first = (text.strip().splitlines() or [""])[0][:300].rstrip(".")
    return f"out of memory{needed} ({type(error).__name__}: {first})."


def _describe_os_error(error: BaseException) -> tuple[int, str] | None:
    if not isinstance(error, OSError) or error.errno is None:
        return None
    if isinstance(error, FileNotFoundError) and error.filename is None and _has_no_working_directory():
        return ExitCode.CONFIG, (
            "the working directory does not exist. Relative paths need an existing directory, and another program has "
            "deleted or replaced this one. Change to an existing directory: cd ~."
        )
    frames = traceback.extract_tb(error.__traceback__)
    prints = lambda frame: "print(" in (frame.line or "") or "flush" in (frame.line or "")
    if error.filename is None and not any(map(prints, frames[-3:])):
        return None
    what = "standard output" if error.filename is None else str(error.filename)
    code = ExitCode.NOT_WRITTEN if error.errno in NOT_WRITTEN else ExitCode.CONFIG
    return code, (
        f"{what[:300]} cannot be used: {error.strerror} (error {error.errno}). spmdkit needs access to it. "
        "Fix the permissions, free some space, or choose another path."
    )


def _has_no_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False
