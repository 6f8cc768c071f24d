"""`data.check`: every row is read once in the background, and a difference between processes or starts ends the run."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import spmdkit as sk
from spmdkit.data import open_source
from spmdkit.data.fingerprint import MAX_BLOCKS, block_digests, block_rows
from spmdkit.errors import ConfigError
from spmdkit.run.hooks.data_check import _differing_process, make
from tests.support.clusters import on_all
from tests.support.small_runs import X, events, line_task, train


class Rows:
    """Rows of `values`, counted when they are read; `bad` raises."""

    def __init__(self, values, bad=None):
        self.values, self.bad, self.reads = values, bad, []

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        self.reads.append(int(i))
        if i == self.bad:
            raise OSError("unreadable")
        return self.values[i]


@pytest.mark.parametrize("length", [1, 7, 255, 256, 257, 1000])
def test_blocks_cover_each_row_once(length):
    blocks = list(block_rows(length))
    assert [row for block in blocks for row in block] == list(range(length))
    assert len(blocks) <= MAX_BLOCKS


@pytest.mark.parametrize("in_memory", [True, False])
def test_each_row_is_read_once_and_each_change_found(in_memory):
    values = np.arange(600.0, dtype=np.float32)
    opened = lambda x: open_source(x if in_memory else Rows(x))
    before = list(block_digests(opened(values)))
    for row in (0, 299, 599):
        changed = values.copy()
        changed[row] += 1
        now = list(block_digests(opened(changed)))
        [block] = [rows for rows, a, b in zip(block_rows(600), before, now, strict=True) if a != b]
        assert row in block
    rows = Rows(values)
    source = open_source(rows)
    rows.reads.clear()
    assert len(list(block_digests(source))) == len(before)
    assert rows.reads == list(range(600))


def test_unreadable_block_is_not_compared():
    digests = list(block_digests(open_source(Rows(np.arange(6.0, dtype=np.float32), bad=3))))
    assert [digest is None for digest in digests] == [False, False, False, True, False, False]
    of = lambda blocks, **more: {"x": {"examples": 6, "in_memory": False, "blocks": blocks, **more}}
    assert not _differing_process([of(digests), of([*digests[:3], "other", *digests[4:]])])
    assert "row 0 differ between process 0 and process 1" in _differing_process([of(digests), of(digests[::-1])])
    assert not _differing_process([of(digests), of(digests[::-1], in_memory=True)])


def checked(folder, changed=None, check="full", **options):
    """Runs the small task on rows that are read separately, of which one in no sample may be changed. Waits in the
    first step until the rows are read."""
    values = X.copy()
    if changed is not None:
        values[changed] += 1
    task = line_task()

    def wait(run, step, *_):
        deadline = time.monotonic() + 60
        while any(thread.name == "data-check" for thread in threading.enumerate()) and time.monotonic() < deadline:
            time.sleep(0.01)

    hooks = [sk.Hook("wait", after_step=wait, order=1)]
    train_data = Rows([{"x": x} for x in values])
    task = sk.Task(
        task.init, task.loss_fn, task.optimizer, train_data=train_data, eval_data=task.eval_data, hooks=hooks
    )
    return train(folder, task, data={"check": check, "shuffle": False}, **options), train_data


OUTSIDE = 201
"""A row in no sample and in no batch of the first 6 steps."""


@pytest.mark.parametrize("check", ["full", "sample"])
def test_changed_row_outside_of_the_sample_ends_a_resumed_run(tmp_path, check):
    checked(tmp_path, steps=5, check=check)
    if check == "sample":
        checked(tmp_path, OUTSIDE, steps=6, check=check)
        return
    assert events(tmp_path, "data_checked")[0]["rows"] == {"train_data": 256, "eval_data": 33}
    with pytest.raises(ConfigError, match=r"train_data has changed: row 201 have .*--allow-change train_data"):
        checked(tmp_path, OUTSIDE, steps=15)
    checked(tmp_path, OUTSIDE, steps=15, allow_change=["train_data"])
    assert len(events(tmp_path, "data_checked")) == 3


def test_off_reads_rows_of_batches_and_those_read_twice(tmp_path):
    _, rows = checked(tmp_path / "off", steps=1, check="off")
    _, sampled = checked(tmp_path / "sample", steps=1, check="sample")
    assert len(set(rows.reads)) < len(set(sampled.reads))
    assert max(rows.reads.count(row) for row in rows.reads) > 1


@pytest.mark.parametrize("changed", [None, 9])
def test_all_processes_find_the_difference(changed):
    def on_process(cluster):
        values = np.arange(20.0, dtype=np.float32)
        if cluster.process_index == 2 and changed is not None:
            values[changed] += 1
        task = SimpleNamespace(named_data=lambda: {"train_data": Rows(values)})
        messages, written = [], []
        events = SimpleNamespace(write=lambda name, **fields: written.append((name, fields["rows"])))
        run = SimpleNamespace(
            cluster=cluster, program=SimpleNamespace(task=task), message=messages.append, events=events
        )
        check = make(sk.Config(task="a.py:t", data={"check": "full"}))
        check.begin(run, 0, None)
        while not check.state():
            time.sleep(0.01)
        stop = check.after_step(run, 1, None, None)
        return stop and (int(stop.code), stop.why[:62]), written

    results = on_all(3, on_process)
    why = "train_data: row 9 differ between process 0 and process 2. Ever"
    assert [stop for stop, _ in results] == [None if changed is None else (78, why)] * 3
    assert results[0][1] == [("data_checked", {"train_data": 20})]
