"""`Driver`: extensions of one training by an outer driver. In-process elasticity (`spmdkit.elastic`) trains the same
run again each time the members of its job change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from spmdkit.checkpoint import Checkpoints
from spmdkit.cluster import Cluster
from spmdkit.config import Config
from spmdkit.faults import StopSignals, Watchdog
from spmdkit.program.program import Program
from spmdkit.program.task import Task
from spmdkit.run.hooks.base import RunView
from spmdkit.run.recovery.restore import Restored
from spmdkit.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class TrainJob:
    """The arguments of `train`, and the resources that it opens before JAX has devices. `retain_memory`:
    whether the process retains freed memory (program/allocator.py)."""

    config: Config
    cluster: Cluster | None
    task: Task | None
    allow_change: tuple[str, ...]
    signals: StopSignals
    retain_memory: bool
    reset: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Driver:
    """The callbacks of an outer driver. By default there is no driver and nothing happens.

    Attributes:
        session: the context of one training, entered after `join`.
        after_step: called before the first step and after each step, on all processes. If it raises an exception that
            `event_fields` recognizes, this training ends.
        restore_from_memory: returns the state in the memory of the processes if it is newer than every checkpoint.
        on_rollback: called when training returns to an earlier step.
        event_fields: returns the fields of the event `membership_changed` for an exception that ends this training but
            not the run; otherwise None.
        notes: lines for the user.
    """

    session: Callable[[Cluster, Watchdog | None, StopSignals], AbstractContextManager[Any]] = (
        lambda cluster, watchdog, signals: nullcontext()
    )
    after_step: Callable[[RunView, int, TrainState], None] = lambda run, step, state: None
    restore_from_memory: Callable[[Cluster, Program, Checkpoints | None], Restored | None] = lambda *_: None
    on_rollback: Callable[[], None] = lambda: None
    event_fields: Callable[[BaseException], Mapping[str, Any] | None] = lambda error: None
    notes: tuple[str, ...] = ()


NO_DRIVER = Driver()
