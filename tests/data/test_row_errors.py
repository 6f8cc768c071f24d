"""How a user's examples are read: by one thread at a time unless asked otherwise, again where that helps, and left out
by a ledger."""

import threading
import time

import numpy as np
import pytest

from spmdkit.data import ReadPolicy, Schedule, SkippedRows, host_batches, open_source
from spmdkit.errors import UserCodeError

NUM = 12


class Handle:
    """A file with a position: what is read is where the last one who looked left it."""

    def __init__(self):
        self.position, self.inside, self.most = 0, 0, 0

    def read(self, i):
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.position = i
        time.sleep(0.001)
        self.inside -= 1
        return np.float32(self.position)


class Rows:
    def __init__(self, handle):
        self.handle = handle

    def __len__(self):
        return NUM

    def __getitem__(self, i):
        return self.handle.read(i)


def in_two_threads(sources, right):
    """Returns the first rows at which `right(source, indices)` is false, for two sources that are read at a time."""
    wrong = []

    def read(source, first):
        if not right(source, np.roll(np.arange(NUM), first)):
            wrong.append(first)

    workers = [threading.Thread(target=read, args=(source, 5 * n)) for n, source in enumerate(sources)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    return wrong


def read_together(threads):
    """Returns what is wrong of two sources with one handle, and the most threads that were inside it."""
    handle = Handle()
    sources = [open_source(Rows(handle), name, ReadPolicy(threads)) for name in ("train_data", "eval_data")]
    return in_two_threads(sources, lambda source, i: np.array_equal(source.gather(i), i)), handle.most


def test_training_and_evaluation_never_read_concurrently():
    assert read_together(threads=1) == ([], 1)


def test_with_more_threads_they_do():
    wrong, most = read_together(threads=2)
    assert most == 2, "the injection did not fire"
    assert wrong


class OneBuffer:
    """Gives the same buffer for every row, as a reader that decodes in place."""

    buffer = np.empty(50_000, np.float32)

    def __len__(self):
        return NUM

    def __getitem__(self, i):
        self.buffer[:] = i
        time.sleep(0.0005)  # the other reader comes to the lock, and has it as soon as it is free
        return self.buffer


def test_row_in_reused_buffer_is_copied():
    def right(source, indices):
        indices = indices.repeat(2)
        return np.array_equal(source.gather(indices)[:, [0, -1]], np.stack([indices, indices], 1))

    assert not in_two_threads([open_source(OneBuffer(), name) for name in ("train_data", "eval_data")], right)


class Flaky:
    """Raises at row 5: `failures` times, or always."""

    def __init__(self, failures, row=5):
        self.failures, self.row, self.reads = failures, row, []

    def __len__(self):
        return NUM

    def __getitem__(self, i):
        self.reads.append(i)
        if i == self.row and self.failures > 0:
            self.failures -= 1
            raise OSError("bad sector")
        return np.float32(i)


class Together(Flaky):
    """Reads a batch in one call."""

    def __getitems__(self, indices):
        return [self[i] for i in indices]


def batches(source, start=1, stop=4, size=4):
    return [
        batch.examples.tolist()
        for _, batch in host_batches(source, Schedule(NUM, size, shuffle=False), None, start, stop)
    ]


def test_transient_failure_is_retried_with_growing_pauses():
    slept, ledger = [], SkippedRows()
    source = open_source(Flaky(3), "train_data", ReadPolicy(1, 3, ledger, slept.append))
    assert batches(source) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert slept == [0.1, 0.2, 0.4]
    (news,) = ledger.take_events()
    assert news["row"] == 5 and news["done"] == "read at attempt 4" and "bad sector" in news["error"]
    assert ledger.take_events() == [] and ledger.positions() == []


def test_too_few_retries_are_an_error():
    for retries in (0, 2):
        with pytest.raises(UserCodeError, match=r"step 2 .*train_data\[5\] raised OSError: bad sector"):
            batches(open_source(Flaky(99), "train_data", ReadPolicy(1, retries, SkippedRows(), lambda s: None)))


def test_next_row_replaces_a_skipped_one():
    ledger = SkippedRows(1)
    source = open_source(Flaky(10**6), "train_data", ReadPolicy(1, 1, ledger, lambda s: None))
    assert batches(source, stop=7) == 2 * [[0, 1, 2, 3], [4, 6, 6, 7], [8, 9, 10, 11]]
    assert ledger.rows == [5] and ledger.positions() == [[2, 5], [5, 5]]
    assert ledger.take_events()[0]["done"] == "skipped, 1 of at most 1 rows (data.max_bad_examples)"


def test_one_row_above_the_limit_is_an_error():
    class Two(Flaky):
        def __getitem__(self, i):
            if i in (5, 6):
                raise OSError(f"bad row {i}")
            return np.float32(i)

    assert batches(open_source(Two(0), "train_data", ReadPolicy(1, 0, SkippedRows(2))))[1] == [4, 7, 7, 7]
    with pytest.raises(UserCodeError, match=r"train_data\[6\] raised OSError: bad row 6"):
        batches(open_source(Two(0), "train_data", ReadPolicy(1, 0, SkippedRows(1))))


@pytest.mark.parametrize("data", [Flaky, Together])
def test_skipped_rows_stay_skipped_after_a_restart(data):
    first = SkippedRows(1)
    before = batches(open_source(data(1), "train_data", ReadPolicy(1, 0, first)), stop=6)
    assert before[1] == [4, 6, 6, 7] and before[4] == [4, 5, 6, 7], "it failed once, and not in the next epoch"
    again = SkippedRows(1)
    again.restore(first.positions())
    source = open_source(data(0), "train_data", ReadPolicy(1, 0, again))
    assert batches(source, start=2, stop=6) == before[1:]
    assert batches(open_source(data(0), "train_data", ReadPolicy(1, 0, SkippedRows(1))), start=2, stop=6) != before[1:]


def test_reopened_source_uses_the_new_policy():
    opened = open_source(Flaky(10**6), "train_data")
    again = open_source(opened, "train_data", ReadPolicy(1, 0, SkippedRows(1)))
    assert batches(again)[1] == [4, 6, 6, 7]
    with pytest.raises(UserCodeError):
        batches(open_source(opened))


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit()])
def test_data_cannot_end_the_run(error):
    class Leaving(Flaky):
        def __getitem__(self, i):
            if i == 5:
                raise error
            return np.float32(i)

    with pytest.raises(UserCodeError, match=rf"step 2 .*train_data\[5\] raised {type(error).__name__}"):
        batches(open_source(Leaving(0), "train_data", ReadPolicy(1, 2, SkippedRows(3), lambda s: None)))
