"""The data of a config and a task: the batches of training and evaluation on one mesh."""

from __future__ import annotations

import contextlib
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
from spmdkit.errors import ConfigError, UserCodeError
from spmdkit.foundation import plugins
from spmdkit.foundation.trees import check_names
from spmdkit.mesh import mesh
from spmdkit.program.task import Task, set_name
from spmdkit.step.step import Batch


class Feeds(NamedTuple):
    """The batches of training, and of each evaluation set; the name of a single set is ""."""

    train: Feed
    eval: dict[str, Feed]


def open_feeds(config: Config, task: Task, on: Mesh, sizes: Mapping[str, int]) -> Feeds:
    """Returns the feeds of a config with a fixed number of microbatches; raises ConfigError if the data do not fit."""
    assert isinstance(config.microbatches, int)
    options = config.data
    check_used(config, task)
    access = functools.partial(data.ReadPolicy, options.threads, options.retries)
    ledger = data.SkippedRows(options.max_bad_examples)
    has_data = task.train_data is not None
    source = _opened(task.train_data, "train_data", access(ledger)) if has_data else data.NumberSource()
    check_names(source.element(), "train_data")
    check_batch(config, sizes)
    process_shares = functools.partial(_shares, on=on, sizes=sizes)
    shares = process_shares(task.train_data, config.largest_batch, config.microbatches, "train_data")
    schedule = _training_schedule(config, source, shares, shuffle=options.shuffle and has_data)
    feed = functools.partial(Feed, mesh=on, sizes=sizes, prefetch=options.prefetch, threads=options.threads)
    train = feed(
        source,
        schedule,
        microbatches=config.microbatches,
        padded=not schedule.always_full,
        skipped_rows=ledger,
        shards=options.shards,
        workers=options.workers,
    )
    if task.eval_data is None:
        if config.eval.every_steps is not None:
            raise ConfigError(
                "eval.every_steps has no effect: the task has no eval_data. Remove it, or pass Task(eval_data=...)."
            )
        return Feeds(train, {})
    ledger = data.SkippedRows(what="eval_data")  # an evaluation uses all its rows
    sets = task.eval_data if isinstance(task.eval_data, data.EvaluationSets) else {"": task.eval_data}
    opened, padded = dict[str, Any](), False
    for name, given in sets.items():
        what = set_name(name) if name else "eval_data"
        source, size = _opened(given, what, access(ledger)), config.eval.batch_size or config.largest_batch
        is_stream, batch_shards = isinstance(source, data.CheckedStream), mesh.count(sizes, mesh.BATCH_AXES)
        num = None if is_stream else sum(getattr(given, "lengths", ())) or len(source)
        size = eval_batch_size(size, num, batch_shards)
        num_shards = None
        if num is None:
            schedule = data.StreamSchedule(size, what, always_full=False)
            num_shards = options.shards if options.shards and size % options.shards == 0 else None
        else:
            schedule = data.eval_schedule(num, size, what, process_shares(given, size, 1, what))
        opened[name] = functools.partial(feed, source, schedule, shards=num_shards)
        padded = padded or not schedule.always_full
    settings = {"microbatches": 1, "padded": padded, "skipped_rows": ledger, "most_batches": config.eval.batches}
    return Feeds(train, {name: open_feed(**settings) for name, open_feed in opened.items()})


def _training_schedule(
    config: Config, source: Any, shares: tuple[data.ProcessRows, ...], shuffle: bool
) -> data.BatchSchedule:
    """Returns the order of the examples in training; `shares`: those of `sk.per_process`, otherwise empty."""
    options, batch_sizes = config.data, data.continued((), 0, config.batch_sizes)
    sizes = batch_sizes if len(batch_sizes) > 1 else ()
    if shares and sizes:
        raise ConfigError("batch_size is a schedule, and train_data is sk.per_process. Set one batch_size.")
    skipped = data.merge_ranges(options.skipped_ranges())
    if isinstance(source, data.CheckedStream):
        return data.StreamSchedule(config.largest_batch, "train_data", options.repeat, skipped, sizes=sizes)
    return data.Schedule(
        num_examples=sum(share.examples for share in shares) or len(source),
        batch_size=config.largest_batch,
        seed=config.seed,
        shuffle=shuffle,
        drop_remainder=options.drop_remainder,
        skipped=skipped,
        shares=shares,
        sizes=sizes,
        buckets=_buckets(options, source),
    )


def check_next_examples(feed: Feed) -> None:
    """Raises ConfigError if the next examples differ in form from example 0, with which a task could not be traced."""
    if not isinstance(feed.source, data.CheckedStream):
        with contextlib.suppress(UserCodeError):
            feed.source.gather(np.arange(min(3, len(feed.source))))


def end_notes(config: Config, evaluated: Mapping[str, Feed]) -> list[str]:
    """Returns a note for each stream that an evaluation reads to its end, since one without an end never returns."""
    return [
        f"{feed.schedule.what} is a stream, which each evaluation reads to its end. If it has none, set "
        "eval: {batches: 100}"
        for feed in evaluated.values()
        if isinstance(feed.source, data.CheckedStream) and config.eval.batches is None
    ]


def with_streams(task: Task, config: Config) -> Task:
    """Returns the task with its streams opened and checked; those of a task that this function returned are unchanged.

    Raises:
        ConfigError: a stream gives other examples when it is opened again, or is per-process.
    """
    opened = {name: _checked(x, name, config) for name, x in task.named_data().items()}
    task = task.with_data(opened)
    if isinstance(task.eval_data, Mapping) and not isinstance(task.eval_data, data.EvaluationSets):
        values = {name: _checked(x, set_name(name), config) for name, x in task.eval_data.items()}
        sets = data.evaluation_sets(values, task.train_data)
        task = dataclasses.replace(task, eval_data=sets) if isinstance(sets, data.EvaluationSets) else task
    return task


def _checked(given: Any, name: str, config: Config) -> Any:
    """Returns a stream opened and checked; other data are unchanged."""
    if isinstance(given, data.PerProcess) and data.open_stream(given.source) is not None:
        raise ConfigError(
            f"{name} is sk.per_process of a stream. A stream is read as shards, and each process reads those "
            f"of its rows. Pass the stream itself: Task({name.partition('[')[0]}=stream)."
        )
    if isinstance(given, data.CheckedStream) or (opened := data.open_stream(given)) is None:
        return given
    return data.check_stream(opened, name, config.seed, config.data.shards, config.data.batched)


def _opened(given: Any, what: str, access: data.ReadPolicy) -> Any:
    return given if isinstance(given, data.CheckedStream) else data.open_source(given, what, access)


def check_used(config: Config, task: Task) -> None:
    """Raises ConfigError for a setting of `data` that the task's kinds of data do not use."""
    options, defaults = config.data, type(config.data)()
    kinds = {isinstance(x, data.CheckedStream) for x in task.named_data().values()}
    trains_on_stream = isinstance(task.train_data, data.CheckedStream)
    only_indexed = [*(["shards", "repeat", "workers"] * (not trains_on_stream)), *(["batched"] * (True not in kinds))]
    only_streams = ["shuffle", "drop_remainder", "max_bad_examples", "bucket_boundaries"] * trains_on_stream
    only_streams += ["threads", "retries"] * (False not in kinds)
    for key in (*only_indexed, *only_streams):
        if getattr(options, key) != getattr(defaults, key):
            needed = "a stream" if key in only_indexed else "data with an index, and train_data is a stream"
            raise ConfigError(f"data.{key} has no effect: it needs {needed}. Remove it.")
    if task.train_data is None:
        _check_without_data(config)
    if trains_on_stream and config.on_nonfinite.save_batch:
        raise ConfigError(
            "on_nonfinite.save_batch has no effect: train_data is a stream, and its batches cannot be read again. "
            "Remove it."
        )
    if trains_on_stream and not options.repeat and plugins.split(config.sync)[0] != "every_step":
        raise ConfigError(
            "data.repeat: false needs sync: every_step: groups that train separately would synchronize after the "
            "stream has ended. Set data.repeat: true and steps."
        )


def _check_without_data(config: Config) -> None:
    """Raises ConfigError for a setting that needs `train_data`."""
    if config.epochs is not None:
        raise ConfigError(f"epochs is {config.epochs}, and the task has no train_data to pass over. Set steps.")
    for name in (name for name, action in config.policies().items() if action == "rollback"):
        where = "on_spike.action" if name == "spike" else f"on_nonfinite.{name}"
        raise ConfigError(
            f"{where} is rollback, and the task has no train_data: keys depend on the seed and the step, so the same "
            "draws would follow. Use stop or skip."
        )


def check_rows(config: Config, task: Task, on: Mesh, sizes: Mapping[str, int], feeds: Feeds) -> list[str]:
    """Returns notes about data with rows that differ when they are read again.

    Raises:
        ConfigError: several processes hold these rows, so that one global array would have several contents.
    """
    notes = []
    for feed in (feeds.train, *feeds.eval.values()):
        name = feed.schedule.what
        if isinstance(feed.source, data.CheckedStream):
            if name == "train_data" and not feed.source.exact:
                notes.append(
                    f"{name} has no state: a restart reads the stream again from its start, about "
                    f"{feed.source.forward_s:.2g} s per million examples"
                )
            continue
        if isinstance(feed.schedule, data.Schedule) and (buckets := feed.schedule.buckets):
            lengths = [bucket.length for bucket in buckets]
            leaves = ", ".join(data.shortened_leaves(feed.source, lengths[-1]))
            numbers = ", ".join(f"{len(x.examples)} up to {x.length}" for x in buckets)
            notes.append(f"{name}: {leaves} are shortened to the buckets: {numbers}")
        if not rows_vary(feed.source, config.data.retries):
            continue
        parts = rows_of_processes(on, sizes, feed.schedule.batch_size, feed.microbatches)
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


def _buckets(options: Any, source: data.Source) -> tuple[data.Bucket, ...]:
    if options.bucket_boundaries is None:
        return ()
    return data.buckets_of(source, options.bucket_by, options.bucket_boundaries, "train_data")


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
