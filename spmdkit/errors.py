"""Every error that a user of spmdkit can meet, and the exit code that the command line gives it.

A message has four parts: what was asked, what was found (with numbers), the rule, the smallest change that works.
`SpmdkitError` and its subclasses are the user's to mend and never show a traceback on the command line; asserts
and everything else are bugs of ours.

    SpmdkitError
      ConfigError          78  the config, the task, the data or the mesh cannot work
      UserCodeError        70  the user's function or data raised; its own frames are kept
      CheckpointWriteError 74  a checkpoint could not be written
      RendezvousError      75  processes did not find each other, or a peer timed out
      HangError            76  a watchdog ended a hang
      NonFiniteError       77  the loss or the state is not finite
      CheckpointError      79  a checkpoint cannot be used
      Preempted            42  stopped on request, saved; start again
"""

from __future__ import annotations


class SpmdkitError(Exception):
    """Base of every error that is the user's to mend. `exit_code` is the command line's exit status."""

    exit_code = 70


class ConfigError(SpmdkitError):
    """The config, the task, the data or the mesh cannot work as asked."""

    exit_code = 78


class UserCodeError(SpmdkitError):
    """The user's function or data source raised. `__cause__` is the original exception."""

    exit_code = 70


class CheckpointWriteError(SpmdkitError):
    """A checkpoint could not be written; what was committed before is intact."""

    exit_code = 74


class RendezvousError(SpmdkitError):
    """Processes did not find each other in time, or a peer went away."""

    exit_code = 75


class HangError(SpmdkitError):
    """A watchdog ended a process that made no progress."""

    exit_code = 76


class NonFiniteError(SpmdkitError):
    """The loss or the state is not finite, and the policy is to stop."""

    exit_code = 77


class CheckpointError(SpmdkitError):
    """A checkpoint cannot be used: damaged, or of another model."""

    exit_code = 79


class Preempted(SpmdkitError):
    """Training stopped because it was asked to, after saving. Start the same command again to go on."""

    exit_code = 42
