"""A complete run of linear regression in this process, in some tenths of a second."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from spmdkit.cluster import detect_cluster, join

X = np.random.default_rng(0).normal(size=(256, 1)).astype(np.float32)


def line_task() -> sk.Task:
    def loss_fn(params, batch, key):
        return sk.mean((batch["x"] @ params["w"] - 2 * batch["x"]) ** 2)

    init = lambda key: {"w": jnp.zeros((1, 1))}
    return sk.Task(init, loss_fn, optax.adam(0.05), train_data={"x": X}, eval_data={"x": X[:33]})


def config_of(folder: Path, **changes: Any) -> sk.Config:
    """Returns the config of 20 steps on two devices in `folder`/run, saved every 5 steps."""
    values = {
        "task": "inline.py:task",
        "run_dir": str(folder / "run"),
        "steps": 20,
        "batch_size": 32,
        "devices": "cpu:2",
        "mesh": {"data": 2},
        "checkpoint": {"every_steps": 5},
        "log": {"every_steps": 5, "progress": "plain"},
    }
    return sk.Config(**{**values, **changes})


def train(folder: Path, task: sk.Task | None = None, allow_change: Sequence[str] = (), **changes: Any) -> Any:
    """Returns the `Result` of a run in this process."""
    config = config_of(folder, **changes)
    return sk.train(config, join(detect_cluster({}), config.devices), task or line_task(), allow_change)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """Returns the records in a file of the run."""
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """Returns the events of one kind."""
    return [event for event in lines(folder, "events.jsonl") if event["event"] == name]


def steps(folder: Path) -> list[int]:
    """Returns the steps in metrics.jsonl without evaluations."""
    return [line["step"] for line in lines(folder, "metrics.jsonl") if line.get("split") != "eval"]
