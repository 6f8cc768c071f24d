"""Streams of every kind of position, and processes as objects that read them."""

import json

import numpy as np

from spmdkit.data.schedule import StreamSchedule
from spmdkit.data.stream_position import merge_positions
from spmdkit.data.stream_reader import StreamReader, check_stream
from spmdkit.data.stream_shards import places
from spmdkit.data.streams.base import open_stream
from spmdkit.data.streams.function import stream
from spmdkit.step.row_order import RowOrder

SIZE, DEVICES, SEED = 32, 4, 11


def example(number):
    return {"id": number, "x": np.arange(3, dtype=np.float32) + number}


@stream
def counted(shard, num_shards, seed):
    """A generator: no state."""
    rng = np.random.default_rng((seed, shard))
    while True:
        yield example(int(rng.integers(1 << 30)))


class Numbers:
    """An iterator over the examples of a shard, in an order drawn from the seed, with a state as torchdata's."""

    def __init__(self, shard, num_shards, seed, num=40):
        self.ids = np.random.default_rng((seed, shard)).permutation(num) + 1000 * shard
        self.next = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == len(self.ids):
            raise StopIteration
        self.next += 1
        return example(int(self.ids[self.next - 1]))

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


exact = stream(Numbers)
"""Short epochs, with a state."""


class Buffered(Numbers):
    """Its state is wrong: it does not contain the examples in its buffer."""

    def load_state_dict(self, state):
        self.next = state["next"] + 1


lies = stream(Buffered)


class Chunks(Numbers):
    """Chunks of 7 rows, with a state as grain's: text and an array."""

    def __next__(self):
        rows = [super(Chunks, self).__next__() for _ in range(min(7, len(self.ids) - self.next) or 1)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    state_dict = load_state_dict = property()

    def get_state(self):
        return {"next": np.array([self.next]), "text": b"\0", "pair": (1, float("inf"))}

    def set_state(self, state):
        assert state["text"] == b"\0" and state["pair"] == (1, float("inf"))
        self.next = int(state["next"][0])


chunks = stream(Chunks)


@stream
def uneven(shard, num_shards, seed):
    """A finite stream with shards of 3 to 10 examples."""
    yield from (example(100 * shard + i) for i in range(3 + shard % 8))


KINDS = {"counted": (counted, False), "exact": (exact, False), "lies": (lies, False), "chunks": (chunks, True)}


class Job:
    """The processes of a job, which read the batches after `start`."""

    def __init__(
        self, data, batched=False, processes=1, start=0, at=None, micro=1, repeat=True, skipped=(), shards=8, workers=0
    ):
        checked = check_stream(open_stream(data), "train_data", SEED, shards, batched)
        positions = RowOrder(DEVICES, micro, SIZE // (DEVICES * micro)).positions()
        self.positions = np.split(positions, processes)
        parts = [places(part, SIZE, micro) for part in self.positions]
        self.readers = [
            StreamReader(checked, shards, {SIZE: parts}, {SIZE: part}, repeat, 2, workers) for part in parts
        ]
        schedule = StreamSchedule(SIZE, "train_data", repeat, skipped)
        for reader in self.readers:
            reader.restore(start, at)
        self.flows = [reader.batches(start + 1, 10_000, schedule) for reader in self.readers]

    def step(self):
        """Returns (step, the ids of the global batch by position, its mask)."""
        ids, mask = np.empty(SIZE, int), np.ones(SIZE, bool)
        for where, flow in zip(self.positions, self.flows, strict=True):
            step, batch = next(flow)
            ids[where] = batch.examples["id"]
            np.testing.assert_array_equal(batch.examples["x"][:, 0], batch.examples["id"].astype(np.float32))
            mask[where] = True if batch.mask is None else batch.mask
        return step, ids, mask

    def position(self, step):
        """Returns the position of all processes, through JSON."""
        return json.loads(json.dumps(merge_positions([reader.position(step) for reader in self.readers])))

    def close(self):
        for flow in self.flows:
            flow.close()


def batches(data, num, **options):
    """Returns the ids of the first batches."""
    job = Job(data, **options)
    found = [job.step()[1] for _ in range(num)]
    job.close()
    return np.stack(found)
