"""The outer driver of in-process elasticity: it trains a run once per membership of the job, in the same process."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from spmdkit import compat
from spmdkit.cluster import Cluster, detect_cluster, join
from spmdkit.compat import membership as compat_membership
from spmdkit.config import Config, replace_keys
from spmdkit.elastic.membership import Membership, membership_from_env
from spmdkit.errors import SpmdkitError
from spmdkit.faults import StopSignals, Watchdog
from spmdkit.foundation.user_code import find
from spmdkit.program.task import Task
from spmdkit.run.driver import Driver, TrainJob
from spmdkit.run.loop import join_cluster
from spmdkit.run.result import Result

NEEDED_LATER = (
    "orbax.checkpoint",
    "jax.experimental.multihost_utils",
    "spmdkit.plan.document",
    "spmdkit.metrics.report.run",
)
"""Modules that a run imports lazily. A standby imports them before it joins."""

NO_EFFECT = "elastic.in_process has no effect: this is not started by spmdkit launch --elastic MIN:MAX"


def train(job: TrainJob, train_once: Callable[..., Result]) -> Result:
    """Returns the result of the last membership. `train_once`: `(job, join, driver) -> Result`, trains once."""
    if not compat.backends_initialized():
        compat_membership.disable_all_reduce_combiner()
    membership = membership_from_env(os.environ, job.config.elastic.snapshot_every) if job.cluster is None else None
    if membership is None:
        return train_once(job, partial(join_cluster, job), Driver(notes=(NO_EFFECT,)))
    driver = Driver(
        session=partial(_session, membership),
        after_step=membership.after_step,
        restore_from_memory=membership.restore,
        on_rollback=membership.memory.snapshots.clear,
        event_fields=partial(_event_fields, membership),
    )
    while True:
        try:
            return train_once(job, partial(_join, membership, job.config), driver)
        except Exception as error:
            if not membership.is_membership_change(error):
                raise
        membership.disconnect()  # outside the handler no frame of the error is referenced


def _join(membership: Membership, config: Config) -> tuple[Cluster, Config]:
    """Joins the next membership. Returns its processes and the config for their number."""
    spec, generation, overrides = membership.wait_for_generation(
        detect_cluster(os.environ, config.cluster.environment), lambda: warm_up(config)
    )
    limit_s = config.watchdog.longest_timeout_s if config.watchdog else None
    cluster = join(spec, config.devices, limit_s, config.cluster.interface, generation)
    return cluster, replace_keys(config, {key: int(value) for key, value in (each.split("=") for each in overrides)})


@contextmanager
def _session(
    membership: Membership, cluster: Cluster, watchdog: Watchdog | None, signals: StopSignals
) -> Iterator[None]:
    """Listens to the launcher. When the membership changes, stops the watchdog and drops references to the run."""
    membership.start_listening(cluster)
    try:
        yield
    except Exception as error:
        if membership.is_membership_change(error):
            if watchdog is not None:
                watchdog.stop()
            signals.on_request = None
        raise


def _event_fields(membership: Membership, error: BaseException) -> Mapping[str, Any] | None:
    if not membership.is_membership_change(error):
        return None
    return {"generation": membership.number, "why": f"{type(error).__name__}: {error}"[:200]}


def warm_up(config: Config) -> None:
    """Imports the modules that a run of `config` needs. Runs no user code except imports and creates no devices.

    An import error is reported later, when the run imports the file.
    """
    for name in NEEDED_LATER:
        importlib.import_module(name)
    target, name = config.task_reference()
    with suppress(SpmdkitError):
        find(f"{target}:{name}", "task", config.folder, Task)
    if compat.backends_initialized():  # by the user's file: a process must join before it creates devices
        compat_membership.disconnect_backend()
