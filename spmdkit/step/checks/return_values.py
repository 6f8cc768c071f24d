"""Checks of the return values of the user's functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spmdkit.errors import ConfigError
from spmdkit.foundation.constants import RESERVED_METRICS
from spmdkit.foundation.trees import describe
from spmdkit.step.metrics.aggregates import Bincount, Derived
from spmdkit.step.metrics.base import Metric, is_metric
from spmdkit.step.metrics.mean import Mean, Means
from spmdkit.step.metrics.user_metric import CustomMetric, as_metric

RULE = (
    "A metric is an sk.mean, sk.sum, sk.max or sk.bincount, an sk.derived of them, your own class with merge and "
    "compute"
)


def checked_loss(out: Any, stateful: bool) -> tuple[Mean | Means, dict[str, Metric], Any]:
    """Returns (loss, metrics, model state) from the return value of a loss; raises ConfigError for anything else."""
    form = "(sk.mean(...), {name: sk.mean(...)}, new_state)" if stateful else "sk.mean(...) or (sk.mean(...), metrics)"
    if stateful:
        if not isinstance(out, tuple) or len(out) != 3:
            raise ConfigError(f"loss_fn of a task with model state returned {shape_of(out)}. It must return {form}.")
        loss, metrics, state = out
    else:
        loss, metrics, state = (*out, None) if isinstance(out, tuple) and len(out) == 2 else (out, {}, None)
    if isinstance(loss, tuple) and loss and isinstance(loss[0], Mean | Means):
        raise ConfigError(
            f"loss_fn returned {shape_of(loss)}. It must return {form}. Only a task with an init that returns "
            "sk.Variables(params, state) also returns a model state. Remove the third value, or return a state from "
            "init."
        )
    if not isinstance(loss, Mean | Means):
        raise ConfigError(
            f"loss_fn returned {shape_of(loss)} as its loss. It must return {form}: a plain number cannot be averaged "
            "over uneven replicas. Return sk.mean(per_example_loss)."
        )
    for mean in loss.parts if isinstance(loss, Means) else (loss,):
        if jnp.ndim(mean.sum) != 0:
            raise ConfigError(f"loss_fn returned an sk.mean of shape {jnp.shape(mean.sum)}. A loss is one number.")
    if not isinstance(metrics, dict):
        raise ConfigError(f"loss_fn returned {shape_of(metrics)} as its metrics. Return a dict {{name: sk.mean(...)}}.")
    if "loss" in metrics:
        raise ConfigError(
            "loss_fn returned a metric called 'loss', which is the name of its first value. Names are unique. Rename "
            "the metric."
        )
    return loss, checked_metrics(metrics, "loss_fn"), state


def checked_metrics(metrics: Any, who: str) -> dict[str, Metric]:
    """Returns `metrics` if it is a dict of mergeable metrics; raises ConfigError otherwise."""
    if not isinstance(metrics, dict):
        raise ConfigError(f"{who} returned {shape_of(metrics)}. It must return a dict {{name: sk.mean(...)}}.")
    check_metric_names(metrics, who)
    checked = {name: as_metric(metric, f"{who}: metric '{name}'") for name, metric in metrics.items()}
    for name, metric in checked.items():
        if not is_metric(metric) or is_array(metric):
            raise ConfigError(
                f"{who} returned metric '{name}' as {shape_of(metric)}. {RULE}, or an sk.scalar, so that it adds over "
                f"replicas and steps. Write '{name}': sk.mean(...)."
            )
    if who == "eval_fn" and not metrics:
        raise ConfigError(
            "eval_fn returned an empty dict. An evaluation has at least one metric. Return {'loss': sk.mean(...)}."
        )
    return checked


def check_metric_names(metrics: dict[Any, Any], who: str) -> None:
    """Raises ConfigError for a name that is not a string, or that is reserved by metrics.jsonl."""
    for name in metrics:
        if not isinstance(name, str) or name in RESERVED_METRICS:
            raise ConfigError(
                f"{who} returned a metric called {name!r}. A name is a string other than "
                f"{', '.join(RESERVED_METRICS)}, which metrics.jsonl reserves. Rename it."
            )


def is_array(metric: Metric) -> bool:
    """Returns whether a metric is an array, where a single number is required."""
    return not isinstance(metric, Bincount | Derived | CustomMetric) and any(
        jnp.ndim(x) for x in jax.tree.leaves(metric)
    )


def shape_of(x: Any) -> str:
    """Returns a short description of a value, for messages."""
    if x is None:
        return "None"
    if isinstance(x, Mean):
        return f"an sk.mean of shape {jnp.shape(x.sum)}"
    if isinstance(x, Means):
        return f"a sum of {len(x.parts)} sk.mean"
    if isinstance(x, Metric):
        return f"an sk.{type(x).__name__.lower()} of shape {jnp.shape(jax.tree.leaves(x)[0])}"
    if isinstance(x, tuple):
        return f"a tuple of {len(x)} ({', '.join(shape_of(y) for y in x)})"
    return describe(x)
