"""The exit path of every exception: a message for users, an error file for the launcher, an exit code, and no hang.

    SpmdkitError                    its message, no traceback                                       its exit code
    UserCodeError                   its message, then the user's frames and exception               70
    a lost peer                     one line (only with several processes; the peer has the cause)  75
    a signal before the first step  one line                                                        42
    KeyboardInterrupt               one line                                                        130
    anything else                   the full traceback: this is a bug in spmdkit                    70

A process that fails, or that is one of several, exits by `os._exit`. JAX's shutdown barrier in `atexit` would otherwise
block it, and through its open sockets all its peers, for up to five minutes (jax 0.10.2).
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from spmdkit.errors import ExitCode, RendezvousError, SpmdkitError, UserCodeError, is_runtime
from spmdkit.faults.error_mapping import describe_external, describe_out_of_memory
from spmdkit.faults.signals import SIGNALS, ExitRequested
from spmdkit.foundation import files, redact
from spmdkit.foundation.constants import ERROR_FILE, NAMELESS, PROCESS_ID
from spmdkit.foundation.formatting import bounded, visible
from spmdkit.foundation.timeouts import LOST_PEER_NAME_S, WATCHDOG_EXIT_S

BUG = "this is a bug in spmdkit"

# Errors that a dead peer causes in the survivors, from Gloo, gRPC and the coordination service. Observed with jaxlib
# 0.10.2 and 0.11.2.
PEER_LOST = re.compile("gloo|connection (?:reset|closed) by peer|coordination ?service|heartbeat timeout", re.I)


STOPPING = [number for number in SIGNALS if number != signal.SIGINT]

exit_callbacks: list[Callable[[int, str], None]] = []
"""Called with (exit code, message) before a process exits because of an exception: the watchdog notifies the other
processes."""

taken_over = threading.Event()
"""Set while the watchdog ends the process: later errors of the training thread, from exited peers, are no cause."""

_owned = [False]


def owns_process() -> bool:
    """Returns whether this process is an spmdkit command, not a user's program that calls spmdkit."""
    return _owned[0]


def run_process(main: Callable[[], int | None]) -> int:
    """Returns the result of `main` when that is 0 in a single process; otherwise reports and exits the process."""
    _owned[0] = True
    _write_record({"running": True})
    try:
        code = main() or 0
    except SystemExit as request:
        if _raised_by_user(request):
            failure = UserCodeError(
                f"SystemExit({request.code!r}) was raised in your own code. A command ends when its work is done: with "
                "code 0 it would pass for done. Return, or raise an error with the reason."
            )
            failure.__cause__ = request
            code = report(failure)
        elif request.code is None or isinstance(request.code, int):
            code = request.code or 0
        else:
            print(visible(str(request.code)), file=sys.stderr)
            code = ExitCode.CHECK_FAILED
        _notify_others(code, "")
    except BaseException as error:  # noqa: BLE001 - this is the last resort, and it reports all of them
        code = report(error)
    finally:
        _owned[0] = False
    if code == 0:
        try:
            sys.stdout.flush()  # reports a full disk now; otherwise Python would, after the exit
        except OSError as error:
            code = report(error)
        except (ValueError, AttributeError):
            code = 0  # closed, or absent
    if code == 0:
        _write_record({"running": False})
    if code != 0 or _has_peers():
        exit_process(code)
    return code


def _raised_by_user(request: SystemExit) -> bool:
    """Returns whether user code, or code that it called, requested the exit: an spmdkit command ends by returning."""
    frames = traceback.extract_tb(request.__traceback__)[1:]  # the first frame is `run_process`
    return any(not is_runtime(frame.filename) and not frame.filename.startswith("<") for frame in frames)


def report(error: BaseException) -> int:
    """Writes the error file and the message for users; returns the exit code."""
    if _owned[0] and threading.current_thread() is threading.main_thread():
        for number in STOPPING:  # the process already exits: another stop request must not change its exit code
            signal.signal(number, signal.SIG_IGN)
    if taken_over.is_set():
        time.sleep(WATCHDOG_EXIT_S)
    code, message = describe(error)
    if code == ExitCode.PEER_LOST and exit_callbacks and taken_over.wait(LOST_PEER_NAME_S):
        time.sleep(WATCHDOG_EXIT_S)  # the watchdog knows the process at fault by now, and ends this process
    write_message(code, message, getattr(error, "blamed", ()))
    _notify_others(code, message)
    return code


def _notify_others(code: int, message: str) -> None:
    for notify in list(exit_callbacks):
        notify(code, message)


def write_message(code: int, message: str, blamed: Sequence[int] = (), stacks: str = "") -> None:
    """Writes the error file and the message; `blamed`: the processes at fault; `stacks`: printed after the message."""
    message = redact.redact_text(message if BUG in message else bounded(message))
    _write_record({"exit_code": code, "message": message, "blamed": list(blamed)})
    with suppress(OSError, ValueError):  # the stream is closed; the error file and the exit code remain
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        print(visible(message), file=sys.stderr, flush=True)
        if stacks:
            print(visible(redact.redact_text(stacks)), file=sys.stderr, flush=True)


def report_and_exit(error: BaseException) -> NoReturn:
    """Reports and ends the process, from any thread: the training thread is blocked."""
    exit_process(report(error))


def exit_with_message(code: int, message: str) -> NoReturn:
    """Ends the process with a message, from any thread."""
    write_message(code, message)
    _notify_others(code, message)
    exit_process(code)


def exit_process(code: int) -> NoReturn:
    """Ends the process immediately: flushes its output, runs nothing else, waits for no thread."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed or broken pipe
            stream.flush()
    if code == 0:
        _write_record({"running": False})  # the command has completed its work
    os._exit(code)


def describe(error: BaseException) -> tuple[int, str]:
    """Returns (exit code, text for people) of an exception."""
    if isinstance(error, ExitRequested):
        return ExitCode.PREEMPTED, str(error)
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, "interrupted"
    if _has_peers() and (lost := lost_peer(error)):
        return RendezvousError.exit_code, (
            f"lost contact with another process: {lost}\nIt ended or became unreachable, so this process cannot "
            "continue; the cause is in the output of that process."
        )
    cause = error.__cause__ if isinstance(error, UserCodeError) else None
    if cause is not None and not isinstance(cause, MemoryError) and (memory := describe_out_of_memory(cause)):
        return memory
    if isinstance(error, SpmdkitError):
        return error.exit_code, error.details()
    if (foreign := describe_external(error)) is not None:
        return foreign
    whole = "".join(traceback.format_exception(error)).rstrip()
    return ExitCode.FAILED, f"{whole}\n{BUG}: please report it with the text above"


def _has_peers() -> bool:
    if "jax" not in sys.modules:
        return False
    from spmdkit import compat

    return compat.coordination_client() is not None


def lost_peer(error: BaseException) -> str | None:
    """Returns the line about a lost process, from the exception or one of its causes."""
    link: BaseException | None = error
    while link is not None:
        is_foreign = isinstance(link, (RuntimeError, ValueError)) and not isinstance(link, SpmdkitError)
        if is_foreign and PEER_LOST.search(str(link)):
            return str(link).strip().splitlines()[0]
        link = link.__cause__
    return None


def _write_record(record: dict[str, Any]) -> None:
    """Writes a record for the launcher, which has set the variable. While a command runs, the record contains that: a
    process that exits with code 0 then (`os._exit`) has not completed its work."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    process = os.environ.get(PROCESS_ID, "0")
    record = {"process": int(process) if process.isdecimal() else 0, **record}
    try:
        text = json.dumps({**record, "time": time.time()})
        if path.startswith(NAMELESS):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        else:
            files.replace(path, text.encode(), mode=0o600)
    except OSError as error:
        print(f"could not write {path}: {error}", file=sys.stderr)
