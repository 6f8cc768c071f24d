"""Every error that spmdkit reports to a user, and its exit code on the command line.

A message has four parts: what was expected, what was found (with numbers), the rule, the smallest change that works.
The user can fix a `SpmdkitError`, and the command line shows it without a traceback. Assertions and all other
exceptions are bugs of spmdkit.
"""

from __future__ import annotations

import enum
import os
import re
import sysconfig
import traceback
from collections.abc import Mapping


class ExitCode(enum.IntEnum):
    """Exit codes of the command line, in addition to 128+n for signal n. `OUTCOMES` describes them."""

    DONE = 0
    CHECK_FAILED = 1
    USAGE = 2
    PREEMPTED = 42
    FAILED = 70
    NOT_WRITTEN = 74
    PEER_LOST = 75
    HANG = 76
    NOT_FINITE = 77
    CONFIG = 78
    CHECKPOINT = 79
    INTERRUPTED = 130


OUTCOMES: Mapping[str, tuple[ExitCode, str]] = {
    "done": (ExitCode.DONE, "done"),
    "check failed": (
        ExitCode.CHECK_FAILED,
        (
            "`verify`, `doctor` or `health_check` found a difference, a `drill` failed, a loss of `bench` is above its "
            "bound, or `migrate` found settings that change training and have no counterpart"
        ),
    ),
    "usage": (ExitCode.USAGE, "invalid command line"),
    "preempted": (ExitCode.PREEMPTED, "stopped and saved, start again"),
    "raised": (ExitCode.FAILED, "your function or data raised or exited"),
    "bug": (ExitCode.FAILED, "a bug of spmdkit, with its traceback"),
    "not written": (ExitCode.NOT_WRITTEN, "a checkpoint, the metrics or another file could not be written"),
    "peer lost": (ExitCode.PEER_LOST, "rendezvous, a peer or the object store timed out"),
    "hang": (ExitCode.HANG, "a watchdog ended a hang"),
    "not finite": (ExitCode.NOT_FINITE, "not finite"),
    "config": (ExitCode.CONFIG, "bad config, task, data or file"),
    "checkpoint": (ExitCode.CHECKPOINT, "checkpoint cannot be used"),
    "interrupted": (ExitCode.INTERRUPTED, "Ctrl-C"),
}
"""Outcome -> exit code and description. Errors, messages, events, the reference and the fuzzer use this table."""

FINAL = (
    *(ExitCode.CHECK_FAILED, ExitCode.USAGE, ExitCode.NOT_FINITE, ExitCode.CONFIG, ExitCode.CHECKPOINT),
    ExitCode.INTERRUPTED,
)
"""Exit codes after which a restart would fail in the same way, or that a user requested: no launcher restarts them."""


def outcome(code: int) -> str:
    """Returns the description of an exit code; for an unknown code, how such codes arise."""
    words = dict.fromkeys(w for c, w in OUTCOMES.values() if c == code)
    return "; ".join(words) or (f"ended by signal {code - 128}" if 128 < code < 193 else "an unknown exit code")


_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


def is_runtime(file: str) -> bool:
    """Returns whether the file of a frame belongs to Python, an installed package or spmdkit."""
    return file.startswith((_PACKAGE, _STDLIB, "<frozen ")) or _INSTALLED.search(file) is not None


class SpmdkitError(Exception):
    """Base of every error that the user can fix. `exit_code` is the command line's exit status."""

    exit_code: int = ExitCode.FAILED

    def details(self) -> str:
        """Returns the message as the command line prints it."""
        return str(self) or type(self).__name__

    def _render_traceback_(self) -> list[str]:
        """Returns what IPython prints: the message, without the frames of spmdkit."""
        return self.details().splitlines()


class ConfigError(SpmdkitError):
    """The config, the task, the data or the mesh is invalid."""

    exit_code = ExitCode.CONFIG


class UserCodeError(SpmdkitError):
    """The user's function or data source raised. `__cause__` is the original exception."""

    def details(self) -> str:
        """Returns the message, the user's frames and the original exception."""
        if (cause := self.__cause__) is None:
            return super().details()
        frames = traceback.extract_tb(cause.__traceback__)
        user_frames = [frame for frame in frames if not is_runtime(frame.filename)]
        shown = traceback.TracebackException(type(cause), cause, None)
        notes = getattr(cause, "__notes__", ())
        shown.__notes__ = [note for note in notes if "JAX has removed its internal frames" not in note]
        lines = traceback.format_list(user_frames or frames[-3:])
        return f"{self}\n{''.join([*lines, *shown.format_exception_only()]).rstrip()}".strip()


class OutOfMemoryError(SpmdkitError):
    """A device, or this process, has no memory left during a run. `__cause__` is the exception of JAX."""


class CheckpointWriteError(SpmdkitError):
    """A checkpoint or the metrics could not be written. Earlier commits are intact."""

    exit_code = ExitCode.NOT_WRITTEN


class RendezvousError(SpmdkitError):
    """Processes did not connect in time, or a peer exited."""

    exit_code = ExitCode.PEER_LOST


class HangError(SpmdkitError):
    """A watchdog ended a process that made no progress."""

    exit_code = ExitCode.HANG


class DeviceError(SpmdkitError):
    """A device computes different numbers and should not be used."""

    exit_code = ExitCode.CHECK_FAILED


class NonFiniteError(SpmdkitError):
    """The loss or the state is not finite, and the policy is to stop."""

    exit_code = ExitCode.NOT_FINITE


class CheckpointError(SpmdkitError):
    """A checkpoint cannot be used: it is damaged, or belongs to another model."""

    exit_code = ExitCode.CHECKPOINT


class DamagedError(CheckpointError):
    """A checkpoint differs from the written one. `found` is the problem, without the repair."""

    def __init__(self, message: str, found: str = ""):
        super().__init__(message)
        self.found = found


class UnreachableError(CheckpointError):
    """The storage of the checkpoints is unreachable or denies access. Its contents are unknown."""


class StoreDownError(UnreachableError):
    """The storage of the checkpoints does not respond. Launchers restart the run: it may respond later."""

    exit_code = ExitCode.PEER_LOST


class Preempted(SpmdkitError):
    """Training stopped on request, after saving. Start the same command again to continue."""

    exit_code = ExitCode.PREEMPTED
