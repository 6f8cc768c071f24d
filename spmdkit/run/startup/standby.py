"""What a standby does before a failure: it imports the modules of a run and the user's file, so that it joins without
delay."""

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
"""Modules that a run imports lazily."""


def warm_up(config: Config) -> None:
    """Imports the modules that a run of `config` needs. Calls no user code and creates no devices.

    An import error is reported later, when the run needs the file.
    """
    for name in NEEDED_LATER:
        importlib.import_module(name)
    target, name = config.task_reference()
    with suppress(SpmdkitError):
        find(f"{target}:{name}", "task", config.folder, Task)
    if compat.backends_initialized():  # by the user's file: a process has to join before it has devices
        compat_membership.leave_backend()
