"""spmdkit: pure training functions over any pytree, parallelism from a config file.

The public names, each imported when it is first used, so that `import spmdkit` costs nothing and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from spmdkit.foundation.version import __version__

if TYPE_CHECKING:
    from spmdkit import testing as testing
    from spmdkit.checkpoint.export import load_params as load_params
    from spmdkit.communication.reducers.base import Reducer as Reducer
    from spmdkit.communication.sync.base import Sync as Sync
    from spmdkit.config import Config as Config, load_config as load_config
    from spmdkit.data.per_process import per_process as per_process
    from spmdkit.data.streams.function import stream as stream
    from spmdkit.data.streams.parquet import parquet as parquet
    from spmdkit.data.streams.tar import tar as tar
    from spmdkit.data.tokens import tokens as tokens
    from spmdkit.errors import SpmdkitError as SpmdkitError
    from spmdkit.foundation.user_code import (
        hook as hook,
        reducer as reducer,
        sync as sync,
        task as task,
        tracker as tracker,
        samples as samples,
        weights as weights,
    )
    from spmdkit.metrics.trackers.base import Tracker as Tracker
    from spmdkit.ops.attention import attention as attention
    from spmdkit.ops.context import (
        context_order as context_order,
        context_positions as context_positions,
        context_restore as context_restore,
    )
    from spmdkit.ops.float8 import float8_histories as float8_histories
    from spmdkit.ops.manual import manual as manual
    from spmdkit.ops.moe import moe as moe
    from spmdkit.ops.pipeline import pipeline as pipeline
    from spmdkit.ops.remat import remat as remat
    from spmdkit.ops.tensor import column_row_parallel as column_row_parallel
    from spmdkit.ops.vocab import cross_entropy as cross_entropy, embed as embed
    from spmdkit.plan.external_step import bill as bill, plan_step as plan_step
    from spmdkit.program.opening import build as build
    from spmdkit.program.program import Program as Program
    from spmdkit.program.task import Task as Task
    from spmdkit.run.hooks.base import (
        Evaluate as Evaluate,
        Hook as Hook,
        ReplaceState as ReplaceState,
        Rollback as Rollback,
        Save as Save,
        Stop as Stop,
    )
    from spmdkit.run.loop import train as train
    from spmdkit.run.prediction import predict as predict
    from spmdkit.run.script import join_processes as join_processes, start_run as start_run
    from spmdkit.step.gradient import value_and_grad as value_and_grad
    from spmdkit.step.metrics.aggregates import (
        Bincount as Bincount,
        Derived as Derived,
        Max as Max,
        Sum as Sum,
        bincount as bincount,
        derived as derived,
        max as max,
        sum as sum,
    )
    from spmdkit.step.metrics.base import Metric as Metric
    from spmdkit.step.metrics.mean import (
        Mean as Mean,
        Means as Means,
        example_keys as example_keys,
        example_mask as example_mask,
        examples as examples,
        mean as mean,
        scalar as scalar,
    )
    from spmdkit.step.replica_collectives import (
        all_gather as all_gather,
        num_replicas as num_replicas,
        pmean as pmean,
        psum as psum,
        replica_index as replica_index,
    )
    from spmdkit.step.state import TrainState as TrainState, Variables as Variables
    from spmdkit.step.user_state import StateView as StateView
    from spmdkit.step.step import Batch as Batch
    from spmdkit.tools.sweep import sweep as sweep
    from spmdkit.step.trace_context import shard as shard, sharded_arange as sharded_arange

_NAMES = {
    "checkpoint.export": "load_params",
    "communication.reducers.base": "Reducer",
    "communication.sync.base": "Sync",
    "config": "Config load_config",
    "data.per_process": "per_process",
    "data.streams.function": "stream",
    "data.streams.parquet": "parquet",
    "data.streams.tar": "tar",
    "data.tokens": "tokens",
    "errors": "SpmdkitError",
    "foundation.user_code": "hook reducer samples tracker sync task weights",
    "metrics.trackers.base": "Tracker",
    "ops.attention": "attention",
    "ops.context": "context_order context_positions context_restore",
    "ops.float8": "float8_histories",
    "ops.manual": "manual",
    "ops.moe": "moe",
    "ops.pipeline": "pipeline",
    "ops.remat": "remat",
    "ops.tensor": "column_row_parallel",
    "ops.vocab": "cross_entropy embed",
    "plan.external_step": "bill plan_step",
    "program.opening": "build",
    "program.program": "Program",
    "program.task": "Task",
    "run.hooks.base": "Evaluate Hook ReplaceState Rollback Save Stop",
    "run.loop": "train",
    "run.prediction": "predict",
    "run.script": "join_processes start_run",
    "step.gradient": "value_and_grad",
    "step.metrics.aggregates": "Bincount Derived Max Sum bincount derived max sum",
    "step.metrics.base": "Metric",
    "step.metrics.mean": "Mean Means example_keys example_mask examples mean scalar",
    "step.replica_collectives": "all_gather num_replicas pmean psum replica_index",
    "step.state": "TrainState Variables",
    "step.user_state": "StateView",
    "step.step": "Batch",
    "step.trace_context": "sharded_arange shard",
    "tools.sweep": "sweep",
    "verify.external_step": "verify_step",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

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
