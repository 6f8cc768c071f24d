"""What a standby does before anybody dies: it imports what a run needs, and the user's file, so that it joins at
once."""

from __future__ import annotations

import importlib
from contextlib import suppress

from spmdkit import compat
from spmdkit.compat import membership as compat_membership
from spmdkit.config import Config
from spmdkit.errors import SpmdkitError
from spmdkit.foundation.user_code import find
from spmdkit.program.task import Task

NEEDED_LATER = (
    "orbax.checkpoint",
    "jax.experimental.multihost_utils",
    "spmdkit.plan.document",
    "spmdkit.metrics.report.run",
)
"""What a run imports only when it comes to it."""


def warm_up(config: Config) -> None:
    """Imports what a run of `config` needs. Calls nothing of the user's, and leaves no devices behind.

    An import error is reported later, when the run needs the file.
    """
    for name in NEEDED_LATER:
        importlib.import_module(name)
    target, name = config.task_reference()
    with suppress(SpmdkitError):
        find(f"{target}:{name}", "task", config.folder, Task)
    if compat.backends_initialized():  # by the user's file: a process has to join before it has devices
        compat_membership.leave_backend()
