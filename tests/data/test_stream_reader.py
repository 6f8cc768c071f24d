"""Batches of streams are the same on any number of processes, and after a restart."""

import random

import numpy as np
import pytest

from spmdkit.data.schedule import StreamSchedule
from spmdkit.data.stream_reader import check_stream, first_rows
from spmdkit.data.streams.base import open_stream
from spmdkit.data.streams.function import stream
from spmdkit.errors import CheckpointError, ConfigError, UserCodeError
from tests.support.streams import KINDS, SIZE, Job, batches, counted, exact, example, uneven

STEPS = 24


def checked(data, batched=False, shards=8):
    return check_stream(open_stream(data), "train_data", 11, shards, batched)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_do_not_depend_on_processes(kind):
    data, batched = KINDS[kind]
    one = batches(data, STEPS, batched=batched)
    assert len(np.unique(one[:2])) == 2 * SIZE
    for processes in (2, 4):
        np.testing.assert_array_equal(batches(data, STEPS, batched=batched, processes=processes), one)


def test_microbatches_have_the_same_set_of_examples():
    one, four = batches(exact, 4), batches(exact, 4, micro=4, processes=2)
    np.testing.assert_array_equal(np.sort(one), np.sort(four))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_restart_on_other_numbers_of_processes(kind, seed):
    data, batched = KINDS[kind]
    stops = [0, *sorted(random.Random(seed).sample(range(1, STEPS), 3)), STEPS]
    found, at = [], None
    for processes, start, stop in zip((1, 2, 4, 1), stops, stops[1:], strict=False):
        job = Job(data, batched, processes, start, at)
        found += [job.step()[1] for _ in range(start, stop)]
        for _ in range(2):  # read ahead: in no position
            job.step()
        at = job.position(stop)
        job.close()
    np.testing.assert_array_equal(np.stack(found), batches(data, STEPS, batched=batched))


def test_a_state_is_used_if_it_is_exact():
    assert [checked(data, batched).exact for data, batched in KINDS.values()] == [False, True, False, True]
    job = Job(exact)
    for _ in range(7):
        job.step()
    shards = job.position(7)["shards"].values()
    assert [(shard["mark"], shard["since"]) for shard in shards] == [({"next": 16}, 12)] * 8
    job.close()


def test_skipped_batches_are_read_and_dropped():
    plain = batches(exact, 6)
    job = Job(exact, skipped=((2, 3), (5, 5)))
    found = [job.step()[1] for _ in range(3)]
    np.testing.assert_array_equal(np.stack(found), plain[[0, 3, 5]])
    assert job.position(3)["batch"] == 6
    job.close()


def test_a_stream_without_a_position_is_read_from_its_start():
    job = Job(counted, start=0)
    later = job.readers[0].batches(5, 5, StreamSchedule(SIZE, "train_data", True))
    (step, batch), plain = next(later), batches(counted, 5)[-1]
    assert step == 5
    np.testing.assert_array_equal(np.sort(batch.examples["id"]), np.sort(plain))


def test_the_end_of_unequal_shards():
    job = Job(uneven, repeat=False, processes=2)
    steps = [job.step() for _ in range(4)]
    found = np.concatenate([ids[mask] for _, ids, mask in steps])
    assert sorted(found) == sorted(100 * shard + i for shard in range(8) for i in range(3 + shard))
    assert [mask.sum() for _, _, mask in steps] == [31, 18, 3, 0]
    assert [[r.is_empty(step) for r in job.readers] for step in (2, 3, 4)] == [[False] * 2, [True, False], [True] * 2]
    again = Job(uneven, repeat=False, start=3, at=job.position(3))
    assert not again.step()[2].any()
    longer = Job(uneven, start=3, at=job.position(3))  # data.repeat: true from here on
    _, ids, mask = longer.step()
    assert mask.all() and set(ids) <= set(found)
    assert {shard["epoch"] for shard in longer.position(4)["shards"].values()} >= {1, 2}
    for each in (job, again, longer):
        each.close()


def test_changed_examples_are_detected_at_a_restart():
    job = Job(counted)
    for _ in range(3):
        job.step()
    at = job.position(3)
    job.close()

    @stream
    def changed(shard, num_shards, seed):
        for number, row in enumerate(counted(shard, num_shards, seed)):
            yield example(0) if (shard, number) == (5, 10) else row

    other = Job(changed, start=3, at=at)
    with pytest.raises(
        CheckpointError, match=r"shard 5 of train_data.* 12 examples before .*--allow-change train_data"
    ):
        other.step()
    assert CheckpointError.exit_code == 79
    other.readers[0].restore(3, at, check=False)
    next(other.readers[0].batches(4, 4, StreamSchedule(SIZE, "train_data", True)))


def test_another_number_of_shards_is_rejected():
    job = Job(counted)
    job.step()
    with pytest.raises(ConfigError, match=r"data.shards is 4, and this run reads train_data as 8 shards"):
        Job(counted, start=1, at=job.position(1), shards=4)


def test_streams_that_cannot_be_read_again_are_rejected():
    varies = stream(lambda *_: (example(int(i)) for i in np.random.default_rng().integers(1 << 30, size=99)))
    with pytest.raises(ConfigError, match=r"other examples each time it is opened.*seed"):
        checked(varies)
    with pytest.raises(ConfigError, match=r"shard 0 of 8 is empty"):
        checked(stream(lambda *_: iter(())))
    with pytest.raises(UserCodeError, match=r"shard 0 of train_data raised KeyError: 'x'"):
        checked(stream(lambda *_: {}["x"]))


def test_examples_of_other_forms_are_rejected():
    ragged = stream(lambda *_: (np.zeros(2 + i // 20) for i in range(99)))
    with pytest.raises(ConfigError, match=r"float64.*astype"):
        checked(ragged)
    ragged = stream(lambda *_: (np.zeros(2 + i // 10, np.int32) for i in range(99)))
    job = Job.__new__(Job)
    with pytest.raises(ConfigError, match=r"shard 0 of train_data: example 10 is int32\[3\].*the stream"):
        job.__init__(ragged)
        next(job.flows[0]), next(job.flows[0]), next(job.flows[0])
    with pytest.raises(ConfigError, match=r"data.batched: true an example is a chunk"):
        checked(stream(lambda *_: iter([{"a": np.zeros(2, np.int32), "b": np.zeros(3, np.int32)}])), batched=True)


def test_an_empty_shard_is_an_error_under_repeat():
    holes = stream(lambda shard, *_: iter([example(1)] * (shard != 3)))
    job = Job(holes)
    with pytest.raises(ConfigError, match=r"shard 3 of 8 of train_data has no examples.*Lower data\.shards"):
        job.step()


def test_a_stream_that_cannot_be_sharded():
    class One:
        def most_shards(self):
            return 1

        def open(self, shard, num_shards, seed, epoch, state):
            assert (shard, num_shards) == (0, 1)
            return exact.open(shard, num_shards, seed, epoch, state)

    one = batches(One(), 5, shards=None)
    np.testing.assert_array_equal(batches(One(), 5, shards=None, processes=4), one)


def test_first_rows():
    rows = first_rows(checked(exact), 50)
    assert rows["x"].shape == (50, 3) and len(set(rows["id"][:40])) == 40
