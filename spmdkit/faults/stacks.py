"""Python stacks of the threads of this process: for a message, and on SIGQUIT."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import traceback
from types import FrameType

from spmdkit.errors import is_runtime

MAX_FRAMES = 10
MONITOR_THREADS = tuple(f"spmdkit-{name}" for name in ("watch", "beat", "last", "signals", "stop", "service"))
"""Threads that never hang."""


CALLBACK_FRAME = re.compile(r"[/\\]jax[/\\]_src[/\\](pure_callback|io_callback|callback|debugging)\.py:")
"""The frames in which JAX calls a callback (jax 0.10.2 to 0.12)."""
JAX_FRAME = re.compile(r"[/\\]jax[/\\](_src|experimental)[/\\]")


def stacks(main: int | None) -> str:
    """Returns the Python stack of the thread `main`, then of the others, without the monitoring threads."""
    names = {t.ident: t.name for t in threading.enumerate()}
    frames = sys._current_frames()
    shown = sorted(frames, key=lambda ident: ident != main)
    parts = []
    for ident in shown:
        name = names.get(ident, "a thread")
        if name in MONITOR_THREADS:
            continue
        text = "".join(traceback.format_stack(frames[ident])[-MAX_FRAMES:]).rstrip().splitlines()
        if not text or (ident != main and _idle(text)):
            continue
        parts.append("\n".join([f"{'training thread' if ident == main else name}:", *text]))
    return "\n".join(parts)


def user_line(thread: int | None) -> str:
    """Returns ` at FILE:LINE` of the innermost user code of a thread, or an empty text."""
    frame = sys._current_frames().get(thread or 0)
    lines = [(f.filename, f.lineno) for f in traceback.extract_stack(frame)] if frame is not None else []
    own = [f" at {file}:{line}" for file, line in lines if not is_runtime(file)]
    return own[-1] if own else ""


def in_jax(thread: int | None) -> bool:
    """Returns whether the innermost Python code of a thread is jax, which waits there for its devices."""
    frame = sys._current_frames().get(thread or 0)
    return frame is not None and JAX_FRAME.search(frame.f_code.co_filename) is not None


def callback_line() -> str:
    """Returns ` at FILE:LINE` of the innermost user code in a callback of a compiled step, or an empty text. Threads of
    the user that JAX has not called do not count."""
    for frame in sys._current_frames().values():
        lines = [f"{each.f_code.co_filename}:{line}" for each, line in traceback.walk_stack(frame)]
        outer = next((n for n, line in enumerate(lines) if CALLBACK_FRAME.search(line)), 0)
        if user_lines := [line for line in lines[:outer] if not is_runtime(line)]:
            return f" at {user_lines[0]}"
    return ""


def _idle(lines: list[str]) -> bool:
    return any(word in lines[-1] for word in ("work_queue.get", "work_item = ", ".wait(", "queue.get", "slots.get"))


def install_sigquit() -> bool:
    """Prints the stacks of all threads to stderr on SIGQUIT, also while the interpreter is blocked (C handler)."""
    number = getattr(signal, "SIGQUIT", None)
    if number is None or sys.__stderr__ is None:
        return False
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.register(number, file=sys.__stderr__, all_threads=True, chain=False)
        return True
    return False


def remove_sigquit() -> None:
    if hasattr(signal, "SIGQUIT"):
        faulthandler.unregister(signal.SIGQUIT)


def restart_exit_timer(seconds: float) -> None:
    """Ends this process with code 1 and the stacks of all threads, unless it is called again in time. A C thread
    (`faulthandler`) measures the time with a clock that also runs while the process is stopped."""
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)


def suspend(number: int, frame: FrameType | None) -> None:
    """Handler of SIGTSTP (Ctrl-Z): stops this process without the deadline that would end it later."""
    faulthandler.cancel_dump_traceback_later()
    os.kill(os.getpid(), signal.SIGSTOP)
