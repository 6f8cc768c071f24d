"""Reads a stream: this process's rows of each batch, with the position after each batch.

    check_stream   before the first step: the form of the examples, whether two openings agree, whether a state is exact
    StreamReader   opens the shards of this process's rows, and reads batches from a position on
    OpenShard      one shard: a mark (the iterator's state), the number of examples since, and their checksum

The position of a step is recorded with its batch, so a batch that was only read ahead is in no record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spmdkit.data.example_form import ExampleForm
from spmdkit.data.open_shards import END, CheckedStream, OpenShard, OpenShards, call_shard, next_example
from spmdkit.data.schedule import StreamSchedule
from spmdkit.data.source import HostBatch, Source, open_source
from spmdkit.data.stream_position import pack, unpack
from spmdkit.data.stream_shards import DEFAULT_SHARDS, check_shards, choose_shards, shards_of
from spmdkit.data.stream_workers import Worker, start_workers
from spmdkit.data.streams.base import Shard, Stream
from spmdkit.errors import ConfigError, UserCodeError

LOOKED_AT = 4
"""Examples that are read before and after a state in `check_stream`."""
RETAINED = 8
"""Positions retained in addition to those of prefetched batches."""


def check_stream(stream: Stream, what: str, seed: int, shards: int | None, batched: bool) -> CheckedStream:
    """Returns a stream that was opened and compared with itself.

    Raises:
        ConfigError: it has no examples, gives other examples when it is opened again, or they have no common form.
    """
    most = stream.most_shards()
    num = min(shards or DEFAULT_SHARDS, DEFAULT_SHARDS if most is None else most)
    user = functools.partial(call_shard, what, 0)
    start: Callable[[], Shard] = lambda: user(lambda: stream.open(0, num, seed, 0, None))
    opened = start()
    batched = batched or getattr(stream, "batched", False)
    with contextlib.suppress(StopIteration):
        example = user(opened.__next__)
        form = ExampleForm(f"shard 0 of {what}: example {{}}", 0, example, "the stream", "example", batched)
        filler = [np.array(x[0] if batched else x) for x in form.leaves(0, example)]
        user(opened.close)
        return _compared(CheckedStream(stream, what, seed, batched, form, filler, False, "", 0.0), num, start)
    raise ConfigError(
        f"{what} has no examples: shard 0 of {num} is empty. A stream yields at least one example per shard. Check its "
        "files, or lower data.shards."
    )


def _compared(data: CheckedStream, num: int, start: Callable[[], Shard]) -> CheckedStream:
    """Returns the stream with what two openings and a state of its first shard show."""
    user = functools.partial(data.call, 0)

    def read(opened: Shard, count: int) -> list[str]:
        examples = itertools.takewhile(lambda x: x is not END, (next_example(data, 0, opened) for _ in range(count)))
        leaves = (data.form.leaves(place, example) for place, example in enumerate(examples))
        return ["".join(f"{zlib.crc32(np.ascontiguousarray(x).tobytes()):08x}" for x in each) for each in leaves]

    opened, state = start(), None
    before = read(opened, LOOKED_AT)
    own = user(opened.state)
    with contextlib.suppress(UserCodeError):  # a state that a checkpoint cannot store: examples are counted
        state = json.loads(json.dumps(pack(own)))
    after = read(opened, LOOKED_AT)
    user(opened.close)
    opened = start()
    again, begin = read(opened, LOOKED_AT), time.perf_counter()
    again += read(opened, LOOKED_AT)
    forward_s = 1e6 * (time.perf_counter() - begin) / LOOKED_AT
    user(opened.close)
    if again != before + after:
        raise ConfigError(
            f"{data.what} gives other examples each time it is opened, so a restarted run cannot continue where it "
            "stopped. The same shard, num_shards and seed must give the same examples. Draw its randomness from a "
            "generator with a seed, such as np.random.default_rng((seed, shard))."
        )
    exact = False
    if state is not None:
        opened = data.open(0, num, 0, unpack(state))
        exact = read(opened, LOOKED_AT) == after
        user(opened.close)
    first = f"{zlib.crc32(''.join(before).encode()):08x}"
    return dataclasses.replace(data, exact=exact, first=first, forward_s=forward_s)


class StreamReader:
    """The rows of one process.

    Args:
        shards: the number of shards of a new run; None: chosen from the batch and the processes.
        parts: batch size -> for each process, the places of its rows in a batch.
        mine: batch size -> the places of this process's rows, in the order of its batches.
        repeat: a stream that ends starts again. Otherwise its rows are missing from then on.
        ahead: maximum number of batches that are read ahead.
        workers: the number of processes that read, at most one per shard; 0: the calling thread reads.
    """

    def __init__(
        self,
        data: CheckedStream,
        shards: int | None,
        parts: Mapping[int, Sequence[np.ndarray]],
        mine: Mapping[int, np.ndarray],
        repeat: bool,
        ahead: int,
        workers: int = 0,
    ):
        self._workers = workers
        self._data, self._shards, self._parts, self._mine = data, shards, parts, mine
        self._repeat, self._retained, self._check = repeat, ahead + RETAINED, True
        self.num_shards = choose_shards(shards, data.stream.most_shards(), parts)
        self.restore(0, None)

    def restore(self, step: int, position: Mapping[str, Any] | None, check: bool = True) -> None:
        """Sets the position after `step`, from a record; None: the start of the stream.

        Args:
            check: compare examples that are read again with the checksum of the record.

        Raises:
            ConfigError: the record has another number of shards than the config, or one that does not fit here.
        """
        num = self.num_shards if position is None else position["num_shards"]
        if self._shards not in (None, num):
            raise ConfigError(
                f"data.shards is {self._shards}, and this run reads {self._data.what} as {num} shards. A run keeps its "
                f"number of shards. Set data.shards: {num}, or null, or set run_dir to a new folder."
            )
        stream = self._data.stream
        limit = getattr(stream, "limit", "it has no more parts, such as files")
        for size, parts in self._parts.items():
            check_shards(num, stream.most_shards(), size, parts, self._data.what, limit)
        self.num_shards, self._check = num, check
        self._start: Mapping[str, Any] = {"num_shards": num, "batch": 0, "shards": {}}
        # A new dict: the thread of an earlier iteration may still write to the old one.
        self._positions: dict[int, Mapping[str, Any]] = {step: self._start if position is None else position}
        self._empty: set[int] = set()

    def position(self, step: int) -> Mapping[str, Any]:
        """Returns this process's part of the position after the batch of `step`."""
        return self._positions[step]

    def epoch(self, step: int) -> int | None:
        """Returns the lowest number of completed epochs of this process's shards after `step`; None: it reads none."""
        return min((at["epoch"] for at in self._positions[step]["shards"].values()), default=None)

    def is_empty(self, step: int) -> bool:
        """Returns whether this process has no row in the batch of `step`."""
        return step in self._empty

    def batches(self, start: int, stop: int, schedule: StreamSchedule) -> Iterator[tuple[int, HostBatch]]:
        """Yields (step, HostBatch) for steps `start` to `stop` (inclusive).

        Skipped batches are read and dropped. Without a recorded position, the stream is read from its start.
        """
        positions, empty, num = self._positions, self._empty, self.num_shards
        before = max((step for step in positions if step < start), default=None)
        at = self._start if before is None else positions[before]
        taken = {size: _taken(mine, num, size) for size, mine in self._mine.items()}
        owned, _ = next(iter(taken.values()))  # the same for each size
        last = at["batch"]
        with contextlib.ExitStack() as opened:
            readers = self._opened(owned.tolist(), at, schedule)
            for reader in readers:
                opened.callback(reader.close)
            for step in range(start, stop + 1):
                for last in range(last + 1, schedule.number(step) + 1):  # noqa: B020
                    rows, mask, parts = self._read(readers, len(owned), schedule.size(last) // num)
                size = schedule.size(last)
                if (take := taken[size][1]) is not None:
                    rows, mask = [x[take] for x in rows], mask[take]
                positions[step] = {"num_shards": num, "batch": last, "shards": parts}
                if not mask.any():
                    empty.add(step)
                for old in [s for s in positions if s < step - self._retained]:
                    del positions[old]
                yield step, HostBatch(self._data.form.tree(rows), None if self._repeat else mask, size)

    def _opened(
        self, owned: list[int], at: Mapping[str, Any], schedule: StreamSchedule
    ) -> Sequence[OpenShards | Worker]:
        """Returns readers of contiguous shards: this process, or worker processes."""
        options = {"repeat": self._repeat, "check": self._check}
        if not self._workers:
            return [OpenShards(self._data, owned, at, schedule, **options)]
        parts = np.array_split(owned, min(self._workers, len(owned)))
        return start_workers(self._data, [part.tolist() for part in parts], at, schedule, **options)

    def _read(
        self, readers: Sequence[OpenShards | Worker], num: int, each: int
    ) -> tuple[list[np.ndarray], np.ndarray, dict[str, Any]]:
        """Returns (leaves, mask, positions) of the next batch in the order of the shards; missing rows hold an
        example."""
        rows, mask, parts, first = self._data.form.empty(num * each), np.ones(num * each, bool), dict[str, Any](), 0
        for reader in readers:
            counts, positions = reader.read([x[first : first + len(reader.shards) * each] for x in rows])
            parts |= positions
            for count in counts:
                if count < each:
                    missing = slice(first + count, first + each)
                    mask[missing] = False
                    for array, leaf in zip(rows, self._data.filler, strict=True):
                        array[missing] = leaf
                first += each
        return rows, mask, parts


def _taken(mine: np.ndarray, num_shards: int, size: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns (the shards of some places, the places in the rows of these shards, None if they are in order)."""
    shard_of, each = shards_of(mine, num_shards, size), size // num_shards
    owned = np.unique(shard_of)
    take = np.searchsorted(owned, shard_of) * each + mine % each
    return owned, None if np.array_equal(take, np.arange(len(owned) * each)) else take


def open_data(data: Any, what: str) -> Source | CheckedStream:
    """Returns a checked stream as it is, and other data as a source."""
    return data if isinstance(data, CheckedStream) else open_source(data, what)


def first_rows(data: CheckedStream, num: int) -> Any:
    """Returns the first `num` examples of a stream as stacked arrays; a shorter stream is repeated."""
    rows, shard = data.form.empty(num), OpenShard(data, 0, 1, None, repeat=True, pause=0)
    shard.read(rows, 0, num)
    shard.close()
    return data.form.tree(rows)
