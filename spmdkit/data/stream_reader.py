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
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spmdkit.data.example_form import ExampleForm
from spmdkit.data.source import HostBatch, Source, open_source
from spmdkit.data.stream_position import pack, unpack
from spmdkit.data.stream_shards import DEFAULT_SHARDS, check_shards, choose_shards, shards_of
from spmdkit.data.streams.base import Shard, Stream
from spmdkit.errors import CheckpointError, ConfigError, SpmdkitError, UserCodeError

LOOKED_AT = 4
"""Examples that are read before and after a state in `check_stream`."""
MARK_EVERY = 16
"""Minimum number of examples between two marks of a shard."""
MARK_SHARE = 0.01
"""Maximum share of the time that is spent on marks."""
READ_AGAIN = 256
"""Examples that are read again at a time."""
RETAINED = 8
"""Positions retained in addition to those of prefetched batches."""


@dataclasses.dataclass(frozen=True)
class CheckedStream:
    """A stream that can be resumed.

    Attributes:
        what: names it in errors; batched: it yields chunks of rows.
        form: the form of its examples; filler: the leaves of one, for padding rows.
        exact: its shards have a state from which they continue. Otherwise they are read again from the start.
        first: a digest of the first examples.
        forward_s: the measured time to read a million examples.
    """

    stream: Stream
    what: str
    seed: int
    batched: bool
    form: ExampleForm
    filler: list[np.ndarray]
    exact: bool
    first: str
    forward_s: float

    in_memory = False

    def element(self) -> Any:
        """Returns the shapes and dtypes of an example."""
        return self.form.element()

    def open(self, shard: int, num_shards: int, epoch: int, state: Any) -> Shard:
        """Returns a shard. Raises UserCodeError if the user's code raises."""
        opened: Shard = self.call(shard, lambda: self.stream.open(shard, num_shards, self.seed, epoch, state))
        return opened

    def call(self, shard: int, call: Callable[[], Any]) -> Any:
        """Returns `call()`, which runs the user's code; StopIteration passes. Raises UserCodeError."""
        return _call(self.what, shard, call)


def _call(what: str, shard: int, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (StopIteration, SpmdkitError):
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        raise UserCodeError(
            f"shard {shard} of {what} raised {type(error).__name__}: {error}. A stream yields examples, and ends by "
            "returning. Fix the code of the stream."
        ) from error


def check_stream(stream: Stream, what: str, seed: int, shards: int | None, batched: bool) -> CheckedStream:
    """Returns a stream that was opened and compared with itself.

    Raises:
        ConfigError: it has no examples, gives other examples when it is opened again, or they have no common form.
    """
    most = stream.most_shards()
    num = min(shards or DEFAULT_SHARDS, DEFAULT_SHARDS if most is None else most)
    user = functools.partial(_call, what, 0)
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
        examples = itertools.takewhile(lambda x: x is not END, (_next(data, 0, opened) for _ in range(count)))
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


END = object()
"""What `_next` returns at the end of a shard."""


def _next(data: CheckedStream, shard: int, opened: Shard) -> Any:
    try:
        return data.call(shard, opened.__next__)
    except StopIteration:
        return END


class OpenShard:
    """A shard that is read, with its position.

    Args:
        at: its position in a record; None: its start.
        repeat: a shard that ends starts its next epoch.
        pause: after a mark that took t seconds, the next one is at least `pause` * t later.
        check: compare the examples that are read again with the checksum.

    Raises:
        CheckpointError: they differ.
    """

    def __init__(
        self,
        data: CheckedStream,
        shard: int,
        num_shards: int,
        at: Mapping[str, Any] | None,
        repeat: bool,
        pause: float,
        check: bool = True,
    ):
        self._data, self._shard, self._num, self._repeat, self._pause = data, shard, num_shards, repeat, pause
        at = at or {"epoch": 0, "given": 0, "mark": None, "since": 0, "checksum": 0, "ended": False}
        self.epoch, self.ended, self._given, self._mark = at["epoch"], at["ended"], at["given"], at["mark"]
        self._since, self._left, self._next_mark = 0, 0, 0.0
        self._chunk: list[np.ndarray] = []
        self._sums = [0] * len(data.form.specs)
        self._iterator: Shard | None = None
        if self.ended and repeat:  # it ended in a run without `repeat`
            self.ended, self.epoch, self._mark = False, self.epoch + 1, None
        elif self.ended:
            return
        self._iterator = data.open(shard, num_shards, self.epoch, None if self._mark is None else unpack(self._mark))
        if at["since"] and not at["ended"]:
            self._read_again(at["since"])
            if check and (self._since != at["since"] or self._checksum() != at["checksum"]):
                self.close()
                raise CheckpointError(
                    f"shard {shard} of {data.what} cannot continue: the {at['since']} examples before its position in "
                    "the checkpoint differ when they are read again. The data, the stream or its library must be those "
                    "of the run. Restore them, or set run_dir to a new folder. To continue anyway: --allow-change "
                    f"{data.what}."
                )

    def _read_again(self, num: int) -> None:
        scratch = self._data.form.empty(min(num, READ_AGAIN))
        while (missing := num - self._since) and self._fill(scratch, 0, min(missing, READ_AGAIN)) is not None:
            pass

    def read(self, out: list[np.ndarray], first: int, num: int) -> int:
        """Writes the next `num` examples into rows of `out` from `first` on. Returns how many; fewer at the end."""
        done = 0
        while done < num and not self.ended:
            self._mark_if_due()
            if (rows := self._fill(out, first + done, num - done)) is None:
                self._end_epoch()
            else:
                done += rows
        self._given += done
        return done

    def _mark_if_due(self) -> None:
        if not self._data.exact or self._left or self._since < MARK_EVERY:
            return
        if (begin := time.perf_counter()) < self._next_mark:
            return
        assert self._iterator is not None
        state = self._data.call(self._shard, self._iterator.state)
        if state is not None:
            self._mark, self._since, self._sums = pack(state), 0, [0] * len(self._sums)
        self._next_mark = (now := time.perf_counter()) + self._pause * (now - begin)

    def _fill(self, out: list[np.ndarray], first: int, num: int) -> int | None:
        """Writes up to `num` examples, and returns how many; None: the shard has ended."""
        assert self._iterator is not None
        rows = 0
        if self._data.batched:
            if not self._left:
                if (chunk := _next(self._data, self._shard, self._iterator)) is END:
                    return None
                self._chunk, self._left = self._data.form.chunk(self._since, chunk)
            rows = min(num, self._left)
            begin = len(self._chunk[0]) - self._left
            for array, leaf in zip(out, self._chunk, strict=True):
                array[first : first + rows] = leaf[begin : begin + rows]
            self._left -= rows
        else:
            rows = self._data.call(self._shard, functools.partial(self._fill_rows, out, first, num))
            if not rows:
                return None
        for i, array in enumerate(out):
            if array.size:
                self._sums[i] = zlib.crc32(array[first : first + rows].reshape(-1).view(np.uint8).data, self._sums[i])
        self._since += rows
        return rows

    def _fill_rows(self, out: list[np.ndarray], first: int, num: int) -> int:
        """Writes up to `num` examples in one call of user code, and returns how many."""
        assert self._iterator is not None
        rows, fetch, write = 0, self._iterator.__next__, self._data.form.write
        with contextlib.suppress(StopIteration):
            while rows < num:
                write(self._since + rows, fetch(), out, first + rows)
                rows += 1
        return rows

    def _end_epoch(self) -> None:
        self.close()
        if not self._repeat:
            self.ended = True
            return
        if self._mark is None and not self._since:
            raise ConfigError(
                f"shard {self._shard} of {self._num} of {self._data.what} has no examples in epoch {self.epoch}. With "
                "data.repeat: true each shard needs at least one. Lower data.shards, or set data.repeat: false."
            )
        self.epoch, self._mark, self._since, self._sums = self.epoch + 1, None, 0, [0] * len(self._sums)
        self._iterator = self._data.open(self._shard, self._num, self.epoch, None)

    def _checksum(self) -> int:
        return zlib.crc32(np.array(self._sums, "<u4").tobytes())

    def position(self) -> dict[str, Any]:
        """Returns the position as JSON. The mark is shared: nothing changes it."""
        return {
            "epoch": self.epoch,
            "given": self._given,
            "mark": self._mark,
            "since": self._since,
            "checksum": self._checksum(),
            "ended": self.ended,
        }

    def close(self) -> None:
        """Closes the iterator. Never raises: the examples are read."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            with contextlib.suppress(Exception):
                iterator.close()


class StreamReader:
    """The rows of one process.

    Args:
        shards: the number of shards of a new run; None: chosen from the batch and the processes.
        parts: for each process, the places of its rows in a batch.
        mine: the places of this process's rows, in the order of its batches.
        repeat: a stream that ends starts again. Otherwise its rows are missing from then on.
        ahead: maximum number of batches that are read ahead.
    """

    def __init__(
        self,
        data: CheckedStream,
        batch_size: int,
        shards: int | None,
        parts: Sequence[np.ndarray],
        mine: np.ndarray,
        repeat: bool,
        ahead: int,
    ):
        self._data, self._batch_size, self._shards, self._parts, self._mine = data, batch_size, shards, parts, mine
        self._repeat, self._retained, self._check = repeat, ahead + RETAINED, True
        self.num_shards = choose_shards(shards, data.stream.most_shards(), batch_size, parts)
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
        check_shards(num, self._data.stream.most_shards(), self._batch_size, self._parts, self._data.what)
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

    def batches(self, start: int, stop: int, number: Callable[[int], int]) -> Iterator[tuple[int, HostBatch]]:
        """Yields (step, HostBatch) for steps `start` to `stop` (inclusive); `number(step)` is the number of its batch.

        Skipped batches are read and dropped. Without a recorded position, the stream is read from its start.
        """
        positions, empty, num, each = self._positions, self._empty, self.num_shards, self._batch_size // self.num_shards
        before = max((step for step in positions if step < start), default=None)
        at = self._start if before is None else positions[before]
        shard_of = shards_of(self._mine, num, self._batch_size)
        owned = np.unique(shard_of)
        take = np.searchsorted(owned, shard_of) * each + self._mine % each
        in_order = np.array_equal(take, np.arange(len(owned) * each))
        opened = list[OpenShard]()
        last = at["batch"]
        try:
            for shard in owned.tolist():
                saved = at["shards"].get(str(shard))
                opened.append(self._open(shard, num, saved, len(owned)))
            for step in range(start, stop + 1):
                for _ in range(number(step) - last):
                    rows, mask = self._read(opened, each)
                last = number(step)
                if not in_order:
                    rows, mask = [x[take] for x in rows], mask[take]
                parts = {str(s): shard.position() for s, shard in zip(owned.tolist(), opened, strict=True)}
                positions[step] = {"num_shards": num, "batch": last, "shards": parts}
                if not mask.any():
                    empty.add(step)
                for old in [s for s in positions if s < step - self._retained]:
                    del positions[old]
                yield step, HostBatch(self._data.form.tree(rows), None if self._repeat else mask)
        finally:
            _close(opened)

    def _open(self, shard: int, num: int, at: Mapping[str, Any] | None, count: int) -> OpenShard:
        return OpenShard(self._data, shard, num, at, self._repeat, count / MARK_SHARE, self._check)

    def _read(self, opened: Sequence[OpenShard], each: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Returns (leaves, mask) of the next batch in the order of the shards; missing rows hold an example."""
        rows, mask = self._data.form.empty(len(opened) * each), np.ones(len(opened) * each, bool)
        for i, shard in enumerate(opened):
            missing = slice(i * each + shard.read(rows, i * each, each), (i + 1) * each)
            mask[missing] = False
            for array, leaf in zip(rows, self._data.filler, strict=True):
                array[missing] = leaf
        return rows, mask


def _close(shards: Sequence[OpenShard]) -> None:
    """Closes shards in parallel, since some libraries sleep for seconds; none when the interpreter exits, where a new
    thread would never run."""
    if sys.is_finalizing():
        return
    threads = [threading.Thread(target=shard.close, daemon=True) for shard in shards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def open_data(data: Any, what: str) -> Source | CheckedStream:
    """Returns a checked stream as it is, and other data as a source."""
    return data if isinstance(data, CheckedStream) else open_source(data, what)


def first_rows(data: CheckedStream, num: int) -> Any:
    """Returns the first `num` examples of a stream as stacked arrays; a shorter stream is repeated."""
    rows, shard = data.form.empty(num), OpenShard(data, 0, 1, None, repeat=True, pause=0)
    shard.read(rows, 0, num)
    shard.close()
    return data.form.tree(rows)
