"""spmdkit: pure training functions over any pytree, parallelism from a config file.

The public names, each imported when it is first used, so that `import spmdkit` costs nothing and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from spmdkit.version import __version__

if TYPE_CHECKING:
    from spmdkit import testing, verify
    from spmdkit.config import Config, load_config
    from spmdkit.data.per_process import per_process
    from spmdkit.errors import SpmdkitError
    from spmdkit.metrics.sinks.base import Sink
    from spmdkit.ops.attention import attention
    from spmdkit.ops.context import context_order, context_positions, context_restore
    from spmdkit.ops.manual import manual
    from spmdkit.ops.moe import moe
    from spmdkit.ops.pipeline import pipeline
    from spmdkit.ops.remat import remat
    from spmdkit.ops.tensor import column_row
    from spmdkit.ops.vocab import cross_entropy, embed
    from spmdkit.program.opening import build
    from spmdkit.program.program import Program
    from spmdkit.reducers.base import Reducer
    from spmdkit.run.hooks.base import Evaluate, Hook, Replace, Rollback, Save, Stop
    from spmdkit.run.loop import train
    from spmdkit.step.across import all_gather, num_replicas, pmean, psum, replica_index
    from spmdkit.step.gradient import value_and_grad
    from spmdkit.step.means import Mean, Means, example_keys, example_mask, examples, mean, scalar
    from spmdkit.step.metric import Metric
    from spmdkit.step.scope import rows, shard
    from spmdkit.step.state import TrainState, Variables
    from spmdkit.step.step import Batch
    from spmdkit.step.totals import Counts, Finished, Max, Sum, counts, finish, max, sum
    from spmdkit.sync.base import Sync
    from spmdkit.tasks import Task
    from spmdkit.user_code import hook, reducer, sink, synchronization, task

_HOME = {
    "Batch": "step.step",
    "Config": "config",
    "Counts": "step.totals",
    "Evaluate": "run.hooks.base",
    "Finished": "step.totals",
    "Hook": "run.hooks.base",
    "Max": "step.totals",
    "Mean": "step.means",
    "Means": "step.means",
    "Metric": "step.metric",
    "Program": "program.program",
    "Reducer": "reducers.base",
    "Replace": "run.hooks.base",
    "Rollback": "run.hooks.base",
    "Save": "run.hooks.base",
    "Sink": "metrics.sinks.base",
    "SpmdkitError": "errors",
    "Stop": "run.hooks.base",
    "Sum": "step.totals",
    "Sync": "sync.base",
    "Task": "tasks",
    "TrainState": "step.state",
    "Variables": "step.state",
    "all_gather": "step.across",
    "attention": "ops.attention",
    "build": "program.opening",
    "column_row": "ops.tensor",
    "context_order": "ops.context",
    "context_positions": "ops.context",
    "context_restore": "ops.context",
    "counts": "step.totals",
    "cross_entropy": "ops.vocab",
    "embed": "ops.vocab",
    "example_keys": "step.means",
    "example_mask": "step.means",
    "examples": "step.means",
    "finish": "step.totals",
    "hook": "user_code",
    "load_config": "config",
    "manual": "ops.manual",
    "max": "step.totals",
    "mean": "step.means",
    "moe": "ops.moe",
    "num_replicas": "step.across",
    "per_process": "data.per_process",
    "pipeline": "ops.pipeline",
    "pmean": "step.across",
    "psum": "step.across",
    "reducer": "user_code",
    "remat": "ops.remat",
    "replica_index": "step.across",
    "rows": "step.scope",
    "scalar": "step.means",
    "shard": "step.scope",
    "sink": "user_code",
    "sum": "step.totals",
    "synchronization": "user_code",
    "task": "user_code",
    "train": "run.loop",
    "value_and_grad": "step.gradient",
}

_MODULES = ("testing", "verify")

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
