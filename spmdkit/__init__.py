"""spmdkit: pure training functions over any pytree, parallelism from a config file.

The public names, each imported when it is first used, so that `import spmdkit` costs nothing and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from spmdkit.foundation.version import __version__

if TYPE_CHECKING:
    from spmdkit import testing
    from spmdkit.communication.reducers.base import Reducer
    from spmdkit.communication.sync.base import Sync
    from spmdkit.config import Config, load_config
    from spmdkit.data.per_process import per_process
    from spmdkit.errors import SpmdkitError
    from spmdkit.foundation.user_code import hook, reducer, sync, task, tracker
    from spmdkit.metrics.trackers.base import Tracker
    from spmdkit.ops.attention import attention
    from spmdkit.ops.context import context_order, context_positions, context_restore
    from spmdkit.ops.manual import manual
    from spmdkit.ops.moe import moe
    from spmdkit.ops.pipeline import pipeline
    from spmdkit.ops.remat import remat
    from spmdkit.ops.tensor import column_row_parallel
    from spmdkit.ops.vocab import cross_entropy, embed
    from spmdkit.program.opening import build
    from spmdkit.program.program import Program
    from spmdkit.program.task import Task
    from spmdkit.run.hooks.base import Evaluate, Hook, ReplaceState, Rollback, Save, Stop
    from spmdkit.run.loop import train
    from spmdkit.step.gradient import value_and_grad
    from spmdkit.step.metrics.aggregates import Bincount, Derived, Max, Sum, bincount, derived, max, sum
    from spmdkit.step.metrics.base import Metric
    from spmdkit.step.metrics.mean import Mean, Means, example_keys, example_mask, examples, mean, scalar
    from spmdkit.step.replica_collectives import all_gather, num_replicas, pmean, psum, replica_index
    from spmdkit.step.state import TrainState, Variables
    from spmdkit.step.step import Batch
    from spmdkit.step.trace_context import shard, sharded_arange

_HOME = {
    "Batch": "step.step",
    "Config": "config",
    "Bincount": "step.metrics.aggregates",
    "Evaluate": "run.hooks.base",
    "Derived": "step.metrics.aggregates",
    "Hook": "run.hooks.base",
    "Max": "step.metrics.aggregates",
    "Mean": "step.metrics.mean",
    "Means": "step.metrics.mean",
    "Metric": "step.metrics.base",
    "Program": "program.program",
    "Reducer": "communication.reducers.base",
    "ReplaceState": "run.hooks.base",
    "Rollback": "run.hooks.base",
    "Save": "run.hooks.base",
    "Tracker": "metrics.trackers.base",
    "SpmdkitError": "errors",
    "Stop": "run.hooks.base",
    "Sum": "step.metrics.aggregates",
    "Sync": "communication.sync.base",
    "Task": "program.task",
    "TrainState": "step.state",
    "Variables": "step.state",
    "all_gather": "step.replica_collectives",
    "attention": "ops.attention",
    "build": "program.opening",
    "column_row_parallel": "ops.tensor",
    "context_order": "ops.context",
    "context_positions": "ops.context",
    "context_restore": "ops.context",
    "bincount": "step.metrics.aggregates",
    "cross_entropy": "ops.vocab",
    "embed": "ops.vocab",
    "example_keys": "step.metrics.mean",
    "example_mask": "step.metrics.mean",
    "examples": "step.metrics.mean",
    "derived": "step.metrics.aggregates",
    "hook": "foundation.user_code",
    "load_config": "config",
    "manual": "ops.manual",
    "max": "step.metrics.aggregates",
    "mean": "step.metrics.mean",
    "moe": "ops.moe",
    "num_replicas": "step.replica_collectives",
    "per_process": "data.per_process",
    "pipeline": "ops.pipeline",
    "pmean": "step.replica_collectives",
    "psum": "step.replica_collectives",
    "reducer": "foundation.user_code",
    "remat": "ops.remat",
    "replica_index": "step.replica_collectives",
    "sharded_arange": "step.trace_context",
    "scalar": "step.metrics.mean",
    "shard": "step.trace_context",
    "tracker": "foundation.user_code",
    "sum": "step.metrics.aggregates",
    "sync": "foundation.user_code",
    "task": "foundation.user_code",
    "train": "run.loop",
    "value_and_grad": "step.gradient",
    "verify_step": "verify.external_step",
}

_MODULES = ("testing",)

__all__ = ["__version__", *sorted((*_HOME, *_MODULES))]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"spmdkit.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'spmdkit' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"spmdkit.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
