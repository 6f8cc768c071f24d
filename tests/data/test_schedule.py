"""The batch of a step is a pure function of (seed, step): every property is checked exactly."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest

from spmdkit.data import ProcessRows, Schedule, eval_schedule, merge_ranges
from spmdkit.data.permutation import SORTED_UP_TO, permute
from spmdkit.errors import ConfigError


@pytest.mark.parametrize("num_examples", [1, 2, 3, 5, 64, 97, 1797, SORTED_UP_TO, SORTED_UP_TO + 1, 20_000])
def test_every_epoch_is_a_permutation(num_examples):
    for seed, epoch in [(0, 0), (0, 1), (7, 3), (2**70, 10**6)]:
        order = permute(np.arange(num_examples), num_examples, seed, epoch)
        assert order.dtype == np.int64
        np.testing.assert_array_equal(np.sort(order), np.arange(num_examples))


def test_order_has_random_access():
    for num_examples in (100, 20_000):
        order = permute(np.arange(num_examples), num_examples, 3, 5)
        part = np.array([99, 4, 4, 0])
        np.testing.assert_array_equal(permute(part, num_examples, 3, 5), order[part])


def test_ten_billion_examples_need_no_table():
    indices = permute(np.arange(1000), 10**10, 0, 0)
    assert len(np.unique(indices)) == 1000
    assert indices.min() >= 0 and 2**32 < indices.max() < 10**10


@pytest.mark.parametrize("num_examples", [1000, 20_000])
def test_epochs_seeds_and_neighbours_are_not_correlated(num_examples):
    positions = np.arange(num_examples)
    order = permute(positions, num_examples, 0, 0)
    for other in (
        positions,
        np.roll(order, 1),
        permute(positions, num_examples, 0, 1),
        permute(positions, num_examples, 1, 0),
    ):
        assert abs(np.corrcoef(order, other)[0, 1]) < 4 / np.sqrt(num_examples)


def test_order_of_a_seed_is_stable_between_versions():
    """Golden values: a change here changes the batches of every run that resumes, so it is a breaking change."""
    assert permute(np.arange(6), 10, 0, 0).tolist() == [4, 2, 1, 5, 7, 0]
    assert permute(np.arange(4), 10**6, 1, 2).tolist() == [506219, 85284, 546460, 422460]
    assert Schedule(1797, 64, seed=0).digest(100) == "fd4890e7801d"


@pytest.mark.parametrize("num_examples,batch_size", [(10, 3), (1797, 64), (20_000, 64), (9, 9), (10_001, 9000)])
@pytest.mark.parametrize("drop_remainder", [True, False])
def test_an_epoch_visits_each_example_once(num_examples, batch_size, drop_remainder):
    schedule = Schedule(num_examples, batch_size, seed=5, drop_remainder=drop_remainder)
    for epoch in (0, 1, 4):
        steps = range(epoch * schedule.steps_per_epoch + 1, (epoch + 1) * schedule.steps_per_epoch + 1)
        assert {schedule.epoch(step) for step in steps} == {epoch}
        seen = np.concatenate([indices[mask] for indices, mask in map(schedule.batch, steps)])
        assert len(np.unique(seen)) == len(seen)
        rest = num_examples % batch_size
        assert len(seen) == (num_examples if not drop_remainder else num_examples - rest)
        np.testing.assert_array_equal(seen, permute(np.arange(len(seen)), num_examples, 5, epoch))


def test_the_short_last_batch_is_masked_exactly():
    schedule = Schedule(10, 4, shuffle=False, drop_remainder=False)
    assert schedule.steps_per_epoch == 3 and not schedule.always_full
    assert schedule.batch(2)[1].all()
    for step in (3, 6):
        indices, mask = schedule.batch(step)
        assert indices[:2].tolist() == [8, 9]
        assert mask.tolist() == [True, True, False, False]
        assert ((indices >= 0) & (indices < 10)).all()


def test_always_full_means_no_missing_row():
    for num_examples in range(1, 13):
        for batch_size in range(1, 13):
            schedule = Schedule(num_examples, batch_size, drop_remainder=False)
            masks = [schedule.batch(step)[1].all() for step in range(1, 2 * schedule.steps_per_epoch + 1)]
            assert schedule.always_full == all(masks)
            if num_examples >= batch_size:
                assert Schedule(num_examples, batch_size).always_full


@pytest.mark.parametrize("num_examples", [1, 63, 64, 65, 1000])
def test_an_evaluation_counts_every_example_exactly_once(num_examples):
    schedule = eval_schedule(num_examples, 64)
    assert schedule.num_batches == -(-num_examples // 64)
    batches = [schedule.batch(step) for step in range(1, schedule.num_batches + 1)]
    assert np.concatenate([indices[mask] for indices, mask in batches]).tolist() == list(range(num_examples))
    for step in (0, schedule.num_batches + 1):
        with pytest.raises(ValueError, match=f"step {step} .*1 to"):
            schedule.batch(step)


def test_the_digest_tells_order_and_missing_rows():
    assert Schedule(8, 8, shuffle=False).digest(1) != Schedule(8, 8, seed=1).digest(1)
    assert Schedule(8, 8, shuffle=False).digest(1) == Schedule(8, 8, shuffle=False, drop_remainder=False).digest(1)
    short = Schedule(7, 8, shuffle=False, drop_remainder=False)
    indices, mask = short.batch(1)
    full = hashlib.sha256(indices.tobytes() + np.ones(8, bool).tobytes()).hexdigest()[:12]
    assert not mask.all() and short.digest(1) != full  # the same indices with no row missing
    assert short.digest(1) == hashlib.sha256(indices.tobytes() + mask.tobytes()).hexdigest()[:12]


def test_batches_cannot_be_changed_by_who_gets_them():
    indices, mask = Schedule(100, 10).batch(1)
    with pytest.raises(ValueError, match="read-only"):
        indices[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        mask[0] = False


@pytest.mark.parametrize(
    "num_examples,batch_size,drop_remainder,words",
    [
        (5, 8, True, ["5 examples", "batch_size is 8", "at most 5", "data.drop_remainder: false"]),
        (0, 8, True, ["eval_data has 0 examples", "at least 1"]),
        (5, 0, False, ["batch_size is 0", "at least 1"]),
    ],
)
def test_impossible_schedules_are_config_errors(num_examples, batch_size, drop_remainder, words):
    with pytest.raises(ConfigError) as error:
        Schedule(num_examples, batch_size, drop_remainder=drop_remainder, what="eval_data")
    for word in words:
        assert word in str(error.value)


def test_skipped_batches_leave_the_others_in_order():
    whole = Schedule(64, 8, seed=3)
    short = dataclasses.replace(whole, skipped=merge_ranges([(9, 10), (3, 3), (4, 4), (10, 12)]))
    assert short.skipped == ((3, 4), (9, 12))
    assert [short.number(step) for step in range(1, 9)] == [1, 2, 5, 6, 7, 8, 13, 14]
    for step, number in ((2, 2), (3, 5), (7, 13)):
        np.testing.assert_array_equal(short.batch(step)[0], whole.batch(number)[0])
        assert short.epoch(step) == whole.epoch(number)
    assert short.numbers(6, 2) == [(8, 8), (13, 13)]
    assert dataclasses.replace(short, skipped=merge_ranges([*short.skipped, *short.numbers(6, 2)])).number(6) == 14


@pytest.mark.parametrize(("drop_remainder", "steps"), [(False, 6), (True, 5)])
def test_per_process_data_are_complete_and_padded(drop_remainder, steps):
    """Process 0 has 22 rows and gives rows 0, 1, 4, 5 of a batch; process 1 has 10 and gives the others."""
    shares = (ProcessRows(22, (0, 1, 4, 5)), ProcessRows(10, (2, 3, 6, 7)))
    schedule = Schedule(32, 8, seed=3, drop_remainder=drop_remainder, shares=shares, skipped=((2, 2),))
    assert (schedule.steps_per_epoch, schedule.always_full) == (steps, False)
    whole = dataclasses.replace(schedule, skipped=())
    for epoch in (0, 1):
        seen = [[], []]
        for step in range(epoch * steps + 1, (epoch + 1) * steps + 1):
            indices, mask = whole.batch(step)
            for process, share in enumerate(shares):
                own, there = whole.local(process).batch(step)
                rows = list(share.rows)
                assert (indices[rows] == own).all() and (mask[rows] == there).all() and whole.epoch(step) == epoch
                seen[process] += own[there].tolist()
        for process, share in enumerate(shares):
            least = share.examples if not drop_remainder else share.examples // 4 * 4
            assert len(seen[process]) == len(set(seen[process])) == least and max(seen[process]) < share.examples
    assert schedule.digest(2) == whole.digest(3) and (schedule.local(1).batch(2)[0] == whole.local(1).batch(3)[0]).all()
    assert whole.local(0).batch(1)[0].tolist() != whole.local(0).batch(1 + steps)[0].tolist()


def test_too_little_per_process_data_is_rejected():
    with pytest.raises(ConfigError, match="train_data of process 1 has 3 examples, batch_size is 4"):
        Schedule(23, 8, shares=(ProcessRows(20, (0, 1, 2, 3)), ProcessRows(3, (4, 5, 6, 7))))
