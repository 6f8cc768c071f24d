"""The data of a config and a task: the batches of training and evaluation on one mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdkit import data
from spmdkit.config import Config, check_batch
from spmdkit.data.feed import Feed, eval_batch_size, rows_of_processes
from spmdkit.data.fingerprint import rows_vary
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import check_names
from spmdkit.mesh import mesh
from spmdkit.program.task import Task
from spmdkit.step.step import Batch


class Feeds(NamedTuple):
    """The batches of training, and of the evaluation (None if the task has no data for it)."""

    train: Feed
    eval: Feed | None


def open_feeds(config: Config, task: Task, on: Mesh, sizes: Mapping[str, int]) -> Feeds:
    """Returns the feeds of a config with a fixed number of microbatches; raises ConfigError if the data do not fit."""
    assert isinstance(config.microbatches, int)
    options = config.data
    if task.train_data is None:
        raise ConfigError(
            "Task.train_data is missing. Training needs it. Pass a mapping of arrays, a source or a grain dataset."
        )
    access = functools.partial(data.ReadPolicy, options.threads, options.retries)
    ledger = data.SkippedRows(options.max_bad_examples)
    source = data.open_source(task.train_data, "train_data", access(ledger))
    check_names(source.element(), "train_data")
    check_batch(config, sizes)
    process_shares = functools.partial(_shares, on=on, sizes=sizes)
    shares = process_shares(task.train_data, config.batch_size, config.microbatches, "train_data")
    schedule = data.Schedule(
        num_examples=sum(share.examples for share in shares) or len(source),
        batch_size=config.batch_size,
        seed=config.seed,
        shuffle=options.shuffle,
        drop_remainder=options.drop_remainder,
        skipped=data.merge_ranges(options.skipped_ranges()),
        shares=shares,
    )
    feed = functools.partial(Feed, mesh=on, sizes=sizes, prefetch=options.prefetch, threads=options.threads)
    train = feed(
        source, schedule, microbatches=config.microbatches, padded=not schedule.always_full, skipped_rows=ledger
    )
    if task.eval_data is None:
        if config.eval.every_steps is not None:
            raise ConfigError(
                "eval.every_steps has no effect: the task has no eval_data. Remove it, or pass Task(eval_data=...)."
            )
        return Feeds(train, None)
    ledger = data.SkippedRows(what="eval_data")  # an evaluation uses all its rows
    source = data.open_source(task.eval_data, "eval_data", access(ledger))
    num = sum(getattr(task.eval_data, "lengths", ())) or len(source)
    size = eval_batch_size(config.eval.batch_size or config.batch_size, num, mesh.count(sizes, mesh.BATCH_AXES))
    schedule = data.eval_schedule(num, size, shares=process_shares(task.eval_data, size, 1, "eval_data"))
    padded = not schedule.always_full
    return Feeds(train, feed(source, schedule, microbatches=1, padded=padded, skipped_rows=ledger))


def check_rows(config: Config, task: Task, on: Mesh, sizes: Mapping[str, int], feeds: Feeds) -> list[str]:
    """Returns notes about data with rows that differ when they are read again.

    Raises:
        ConfigError: several processes hold these rows, so that one global array would have several contents.
    """
    notes = []
    for name, feed in (("train_data", feeds.train), ("eval_data", feeds.eval)):
        if feed is None or not rows_vary(feed.source, config.data.retries):
            continue
        parts = rows_of_processes(on, sizes, feed.schedule.batch_size, feed.grid[1])
        if sum(map(len, parts)) > len(np.unique(np.concatenate(parts))):
            raise ConfigError(
                f"{name}: rows differ each time they are read, and several of the {len(parts)} processes hold the same "
                "rows of a batch: one global array would have several contents. Row i must be the same on every "
                "process. Draw augmentation in the loss from sk.example_keys(), with grain's random_map, or from "
                "np.random.default_rng(i) in __getitem__(i)."
            )
        notes.append(
            f"{name}: rows differ each time they are read, so a resumed run is not bitwise identical. Draw "
            "augmentation in the loss from sk.example_keys(), or with grain's random_map"
        )
    return notes


def _shares(
    given: Any, size: int, microbatches: int, what: str, *, on: Mesh, sizes: Mapping[str, int]
) -> tuple[data.ProcessRows, ...]:
    """Returns each process's part of a batch if data are loaded per process; otherwise nothing."""
    if not isinstance(given, data.PerProcess) or jax.process_count() == 1:
        return ()
    return data.shares(given, rows_of_processes(on, sizes, size, microbatches), what)


def limited(config: Config, batch: Batch, on: Mesh) -> tuple[Batch, jax.Array | None]:
    """Returns (the abstract batch of a step, the initial limit of its loss (infinity) or None)."""
    if config.on_spike is None:
        return batch, None
    limit = placed_limit(on, None)
    shape: Any = jax.ShapeDtypeStruct((), limit.dtype, sharding=limit.sharding)
    return dataclasses.replace(batch, limit=shape), limit


def placed_limit(on: Mesh, limit: float | None) -> jax.Array:
    """Returns the loss limit, replicated over a mesh; None is infinity."""
    value = np.float32(np.inf if limit is None else limit)
    return jax.make_array_from_callback((), NamedSharding(on, PartitionSpec()), lambda _: value)
