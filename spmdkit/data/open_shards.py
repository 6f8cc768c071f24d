"""An open shard, with its position, and several of them, which supply a block of rows of each batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmdkit.data.example_form import ExampleForm
from spmdkit.data.schedule import StreamSchedule
from spmdkit.data.stream_position import pack, unpack
from spmdkit.data.streams.base import Shard, Stream
from spmdkit.errors import CheckpointError, ConfigError, SpmdkitError, UserCodeError

MARK_EVERY = 16
"""Minimum number of examples between two marks of a shard."""
MARK_SHARE = 0.002
"""Maximum share of the time that is spent on marks."""
READ_AGAIN = 256
"""Examples that are read again at a time."""


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
        return call_shard(self.what, shard, call)


def call_shard(what: str, shard: int, call: Callable[[], Any]) -> Any:
    """Returns `call()`, as `CheckedStream.call`."""
    try:
        return call()
    except (StopIteration, SpmdkitError):
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        raise UserCodeError(
            f"shard {shard} of {what} raised {type(error).__name__}: {error}. A stream yields examples, and ends by "
            "returning. Fix the code of the stream."
        ) from error


END = object()
"""What `next_example` returns at the end of a shard."""


def next_example(data: CheckedStream, shard: int, opened: Shard) -> Any:
    """Returns the next example or chunk of an open shard, or `END`."""
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
                if (chunk := next_example(self._data, self._shard, self._iterator)) is END:
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


class OpenShards:
    """Shards that are read in this process.

    Args:
        shards: their numbers; at: the position of the stream.
        schedule: its batches.
        options: `repeat` and `check` of each `OpenShard`.
    """

    def __init__(
        self,
        data: CheckedStream,
        shards: Sequence[int],
        at: Mapping[str, Any],
        schedule: StreamSchedule,
        **options: bool,
    ):
        self.shards, self._schedule, self._opened = shards, schedule, list[OpenShard]()
        self._num, self._number = at["num_shards"], at["batch"]
        try:
            for shard in shards:
                pause = len(shards) / MARK_SHARE
                position = at["shards"].get(str(shard))
                self._opened.append(OpenShard(data, shard, self._num, position, pause=pause, **options))
        except BaseException:
            self.close()
            raise

    def read(self, out: list[np.ndarray]) -> tuple[list[int], dict[str, Any]]:
        """Writes the rows of the next batch to `out`. Returns the number of rows of each shard, and the positions
        after."""
        self._number += 1
        each = self._schedule.size(self._number) // self._num
        counts = [shard.read(out, i * each, each) for i, shard in enumerate(self._opened)]
        return counts, {str(n): shard.position() for n, shard in zip(self.shards, self._opened, strict=True)}

    def close(self) -> None:
        """Closes shards in parallel, since some libraries sleep for seconds; none when the interpreter exits, where a
        new thread would never run."""
        if sys.is_finalizing():
            return
        threads = [threading.Thread(target=shard.close, daemon=True) for shard in self._opened]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
