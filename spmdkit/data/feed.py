"""`Feed`: global batches on the mesh from data on the host. Each process loads only the rows of its devices."""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from spmdkit import data
from spmdkit.compat.user_mesh import ignores_user_settings
from spmdkit.data.stream_shards import places
from spmdkit.errors import ConfigError
from spmdkit.mesh.mesh import BATCH_AXES, canonical, count
from spmdkit.step.row_order import RowOrder
from spmdkit.step.step import Batch

PREFETCH = 2
"""Batches that are prefetched by default."""
SMALL_BATCH_BYTES = 1 << 18
"""Arrays in memory with smaller batches are not prefetched on CPU devices: with 16 KiB, gathering and putting a batch
takes 120 us, and 280 us in a thread (two cores, jax 0.10.2, 2026-11-28)."""


class _Rows(NamedTuple):
    """This process's rows of a batch: those of the global array that its devices store, and their positions."""

    local: np.ndarray
    positions: np.ndarray


class Feed:
    """The batches of one data set on one mesh.

    Layout: every leaf [global batch, ...] is sharded over the batch axes, with rows ordered by
        `spmdkit.step.row_order`.

    Attributes:
        source: the data; microbatches: parts of a batch.
        num_batches: the number of batches of an evaluation.
        skipped_rows: the skipped rows and retries of this process.
    """

    def __init__(
        self,
        source: data.Source | data.CheckedStream,
        schedule: data.BatchSchedule,
        mesh: Mesh,
        sizes: Mapping[str, int],
        *,
        microbatches: int,
        prefetch: int | None,
        threads: int,
        padded: bool,
        skipped_rows: data.SkippedRows,
        shards: int | None = None,
        workers: int = 0,
        most_batches: int | None = None,
    ):
        self.source, self.schedule, self.skipped_rows = source, schedule, skipped_rows
        self._prefetch, self._threads, self._padded = prefetch or PREFETCH, threads, padded
        self._is_default = prefetch is None
        self._shards, self.microbatches = count(sizes, BATCH_AXES), microbatches
        self._sharding = NamedSharding(mesh, canonical([BATCH_AXES], sizes))
        self._one_process = jax.process_count() == 1
        self._rows = {size: self._rows_of(size) for _, size in schedule.sizes or ((0, schedule.batch_size),)}
        self._most_batches = most_batches
        self._reader: data.StreamReader | None = None
        if isinstance(source, data.CheckedStream):
            of: Callable[[np.ndarray, int], np.ndarray] = lambda positions, size: places(positions, size, microbatches)
            parts = {
                size: [of(positions, size) for positions in rows_of_processes(mesh, sizes, size, microbatches)]
                for size in self._rows
            }
            mine = {size: of(rows.positions, size) for size, rows in self._rows.items()}
            self._reader = data.StreamReader(source, shards, parts, mine, schedule.always_full, self._prefetch, workers)

    def _rows_of(self, size: int) -> _Rows:
        local = _rows(self._sharding.addressable_devices_indices_map((size,)).values(), size)
        return _Rows(local, RowOrder(*self.grid(size)).positions()[local])

    def grid(self, size: int) -> tuple[int, int, int]:
        """Returns (shards, microbatches, rows) of a batch."""
        return self._shards, self.microbatches, size // (self._shards * self.microbatches)

    def other_shapes(self) -> dict[str, Batch]:
        """Returns the batches of other shapes than `abstract`, by name: other batch sizes or buckets of lengths."""
        found = {f"{size} examples": self.abstract(size) for size in self._rows if size != self.schedule.batch_size}
        buckets = self.schedule.buckets if isinstance(self.schedule, data.Schedule) else ()
        return found | {f"length {x.length}": self.abstract(None, x.length) for x in buckets[:-1] if len(x.examples)}

    def abstract(self, size: int | None = None, length: int | None = None) -> Batch:
        """Returns a batch, by default the largest, as `jax.ShapeDtypeStruct` leaves with their shardings. `length`: of
        a bucket."""
        size = size or self.schedule.batch_size
        longest = self.schedule.buckets[-1].length if length and isinstance(self.schedule, data.Schedule) else None
        shape: Any = lambda x: (length, *x.shape[1:]) if length and x.shape[:1] == (longest,) else x.shape
        leaf: Any = lambda x: jax.ShapeDtypeStruct((size, *shape(x)), x.dtype, sharding=self._sharding)
        mask = leaf(jax.ShapeDtypeStruct((), np.bool_)) if self._padded else None
        return Batch(jax.tree.map(leaf, self.source.element()), mask)

    def stream(self, start: int, stop: int) -> data.DeviceBatches:
        """Returns an iterator of `(step, batch, wait_s)` for steps `start` to `stop` (inclusive), prefetched to the
        devices."""
        if self._reader is not None:
            assert isinstance(self.schedule, data.StreamSchedule)
            local = self._reader.batches(start, stop, self.schedule)
        else:
            local = self._host_batches(start, stop)
        return data.device_batches(local, self._place, self._depth)

    @property
    def _depth(self) -> int:
        """The number of batches on the devices ahead of the loop."""
        on_cpu = self._sharding.mesh.devices.flat[0].platform == "cpu"
        if not (self._is_default and on_cpu and self._reader is None and self.in_memory):
            return self._prefetch
        leaves = jax.tree.leaves(self.source.element())
        row_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
        num_rows = self.schedule.batch_size // jax.process_count()
        return 0 if row_bytes * num_rows <= SMALL_BATCH_BYTES else self._prefetch

    def _host_batches(self, start: int, stop: int) -> Iterator[tuple[int, data.HostBatch]]:
        """Yields (step, HostBatch) of indexed data, from each step at which the batch size changes on."""
        source, schedule = self._indexed()
        shares, number, size_of = schedule.shares, schedule.number, schedule.size
        while start <= stop:
            size = size_of(number(start))
            end = min((first for first, _ in schedule.sizes if first >= number(start)), default=sys.maxsize)
            later = bisect.bisect_right(range(start, stop + 1), end, key=number)  # steps with batches up to `end`
            # With shares the source has only the rows of this process, in order.
            read = schedule.local(jax.process_index()) if shares else schedule
            positions = None if shares else self._rows[size].positions
            local = data.host_batches(source, read, positions, start, start + later, self._prefetch, self._threads)
            for step, batch in local:
                yield step, batch._replace(size=size)
            start += later

    @property
    def num_batches(self) -> int:
        """The number of batches of an evaluation; a stream may end before."""
        return min(self.schedule.num_batches, self._most_batches or sys.maxsize)

    @property
    def ends(self) -> bool:
        """Whether the data are a stream that ends: all rows of its last batches are missing."""
        return self._reader is not None and not self.schedule.always_full

    def is_empty(self, step: int) -> bool:
        """Returns whether this process has no row in the batch of `step`, because its part of a stream has ended."""
        return self._reader is not None and self._reader.is_empty(step)

    def epoch(self, step: int) -> float | None:
        """Returns the number of passes over the data after `step`; of a stream, the completed ones of the shard with
        the fewest on this process. None: a stream does not repeat, or the task has no data."""
        if isinstance(self.source, data.NumberSource):
            return None
        if isinstance(self.schedule, data.Schedule):
            return self.schedule.passes(step)
        return self._reader.epoch(step) if self._reader is not None and self.schedule.always_full else None

    def position(self, step: int) -> Mapping[str, Any] | None:
        """Returns this process's part of the position of a stream after the batch of `step`; None for indexed data,
        where it is the step."""
        return None if self._reader is None else self._reader.position(step)

    def restore(self, step: int, position: Mapping[str, Any] | None, check: bool = True) -> None:
        """Sets the position of a stream after `step`, merged over all processes; None: the start of the stream.

        Args:
            check: `StreamReader.restore`.
        """
        if self._reader is not None:
            self._reader.restore(step, position, check)

    def _indexed(self) -> tuple[data.Source, data.Schedule]:
        assert isinstance(self.schedule, data.Schedule) and not isinstance(self.source, data.CheckedStream)
        return self.source, self.schedule

    @property
    def in_memory(self) -> bool:
        """Whether all rows are arrays in this process's memory."""
        return self.source.in_memory and not self._indexed()[1].shares

    def read(self, step: int) -> data.HostBatch:
        """Returns the full batch of `step` on the host, in the order of positions."""
        return data.HostBatch(*data.read_step(*self._indexed(), None, step))

    def put(self, examples: Any, mask: Any = None) -> Batch:
        """Returns a batch on the devices from full host arrays in the order of positions.

        Raises:
            ConfigError: the number of examples differs from the batch size.
        """
        for leaf in jax.tree.leaves(examples):
            if (size := next(iter(np.shape(leaf)), 0)) not in self._rows:
                raise ConfigError(
                    f"put: an array has shape {np.shape(leaf)}, batch_size is {' or '.join(map(str, self._rows))}. A "
                    "step takes whole batches."
                )
        if mask is None and self._padded:
            mask = np.ones(size, bool)
        pick: Callable[[Any], np.ndarray] = lambda x: np.asarray(x)[self._rows[size].positions]
        return self._place(data.HostBatch(jax.tree.map(pick, examples), None if mask is None else pick(mask), size))

    @ignores_user_settings
    def _place(self, local: Any) -> Batch:
        """Returns the global batch from this process's rows `local`."""
        mask, size = local.mask, local.size or self.schedule.batch_size
        rows = self._rows[size].local
        if self._padded and mask is None:
            mask = np.ones(len(rows), bool)

        # Half the time of `jax.device_put` of the tree: 13 instead of 27 us a leaf on two CPU devices (jax 0.10.2,
        # 2026-11-20). As with device_put, an array on a CPU device may share the memory of the one in `local`.
        def place(x: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(
                (size, *x.shape[1:]), self._sharding, lambda index: x[self._local(index, rows, size)]
            )

        batch: Batch = jax.tree.map(place, Batch(local.examples, mask))
        return batch

    def _local(self, index: Any, rows: np.ndarray, size: int) -> Any:
        """Returns the slice of this process's rows that a device stores."""
        return index[0] if self._one_process else np.searchsorted(rows, np.arange(size)[index[0]])


def _rows(indices: Iterable[Any], size: int) -> np.ndarray:
    """Returns the rows of a global batch that some devices store, ascending."""
    parts = [np.arange(size)[index] for index in indices if index is not None]
    return np.unique(np.concatenate(parts)) if parts else np.arange(0)


def rows_of_processes(mesh: Mesh, sizes: Mapping[str, int], size: int, microbatches: int) -> list[np.ndarray]:
    """Returns, for each process, the positions of its rows in a global batch of `size`, in the order in which a `Feed`
    reads them."""
    shards = count(sizes, BATCH_AXES)
    positions = RowOrder(shards, microbatches, size // (shards * microbatches)).positions()
    indices: dict[int, list[Any]] = {}
    places: Mapping[Any, Any] = NamedSharding(mesh, canonical([BATCH_AXES], sizes)).devices_indices_map((size,))
    for device, index in places.items():
        indices.setdefault(device.process_index, []).append(index)
    return [positions[_rows(indices[process], size)] for process in sorted(indices)]


def eval_batch_size(batch_size: int, num_examples: int | None, shards: int) -> int:
    """Returns the evaluation's batch size: at most the number of examples, rounded up to a multiple of the shards."""
    return math.ceil(min(batch_size, num_examples or batch_size) / shards) * shards


SEAMS = {"place": Feed._place}
"""`verify` replaces this function (verify/mutations.py)."""
