"""Every error that a user of spmdkit can meet, and the exit code that the command line gives it.

A message has four parts: what was asked, what was found (with numbers), the rule, the smallest change that works.
`SpmdkitError` and its subclasses are the user's to fix and never show a traceback on the command line; asserts
and everything else are bugs of ours.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """How the command line ends; beside these 128+n, ended by signal n. The one table: docs/guide.md is held to it by a test."""

    DONE = 0
    CHECK_FAILED = 1  # verify has found a difference
    PREEMPTED = 42  # stopped on request, saved; start the same command again
    FAILED = 70  # the user's function or data raised, or a bug of ours
    NOT_WRITTEN = 74  # a checkpoint, or the metrics, could not be written
    PEER_LOST = 75  # processes did not find each other, or one went away
    HANG = 76  # a watchdog ended a hang
    NOT_FINITE = 77  # the loss or the state is not finite
    CONFIG = 78  # the config, the task, the data or the mesh cannot work
    CHECKPOINT = 79  # a checkpoint cannot be used
    INTERRUPTED = 130  # Ctrl-C


class SpmdkitError(Exception):
    """Base of every error that is the user's to fix. `exit_code` is the command line's exit status."""

    exit_code: int = ExitCode.FAILED


class ConfigError(SpmdkitError):
    """The config, the task, the data or the mesh cannot work as asked."""

    exit_code = ExitCode.CONFIG


class UserCodeError(SpmdkitError):
    """The user's function or data source raised. `__cause__` is the original exception."""

    exit_code = ExitCode.FAILED


class CheckpointWriteError(SpmdkitError):
    """A checkpoint, or the metrics, could not be written; what was committed before is intact."""

    exit_code = ExitCode.NOT_WRITTEN


class RendezvousError(SpmdkitError):
    """Processes did not find each other in time, or a peer went away."""

    exit_code = ExitCode.PEER_LOST


class HangError(SpmdkitError):
    """A watchdog ended a process that made no progress."""

    exit_code = ExitCode.HANG


class NonFiniteError(SpmdkitError):
    """The loss or the state is not finite, and the policy is to stop."""

    exit_code = ExitCode.NOT_FINITE


class CheckpointError(SpmdkitError):
    """A checkpoint cannot be used: damaged, or of another model."""

    exit_code = ExitCode.CHECKPOINT


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written. `found` says what is wrong, without the way back."""

    def __init__(self, message: str, found: str = ""):
        super().__init__(message)
        self.found = found


class Preempted(SpmdkitError):
    """Training stopped because it was asked to, after saving. Start the same command again to go on."""

    exit_code = ExitCode.PREEMPTED
