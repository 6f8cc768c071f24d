"""Which shard of a stream supplies which row."""

import itertools

import numpy as np
import pytest

from spmdkit.data.stream_shards import check_shards, choose_shards, places, shards_of
from spmdkit.errors import ConfigError
from spmdkit.step.row_order import RowOrder


def parts_of(size, devices, processes, microbatches):
    """Returns the places of each process's rows, on a mesh with `devices` shards of the batch."""
    positions = RowOrder(devices, microbatches, size // (devices * microbatches)).positions()
    return np.split(places(positions, size, microbatches), processes)


MESHES = [
    (size, num, devices, processes, micro)
    for size, num, devices, processes, micro in itertools.product(
        (32, 48, 96, 256), (1, 4, 8, 16, 32), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4)
    )
    if devices % processes == 0 and size % (devices * micro) == 0 and size % num == 0 and num % processes == 0
]


def test_no_mesh_divides_a_shard_or_changes_its_rows():
    assert len(MESHES) > 300
    for size, num, devices, processes, micro in MESHES:
        parts = parts_of(size, devices, processes, micro)
        check_shards(num, None, size, parts, "train_data")
        owned = [set(shards_of(part, num, size).tolist()) for part in parts]
        assert sum(map(len, owned)) == num and set.union(*owned) == set(range(num))
        # The shard of a position does not depend on the devices, and each shard has the same number of rows.
        here = shards_of(places(np.arange(size), size, micro), num, size)
        order = RowOrder(devices, micro, size // (devices * micro)).positions()
        np.testing.assert_array_equal(here[order], shards_of(np.concatenate(parts), num, size))
        assert set(np.bincount(here)) == {size // num}


@pytest.mark.parametrize(
    ("size", "processes", "most", "chosen"),
    [
        (256, 1, None, 16), (256, 4, None, 16), (96, 4, None, 16), (100, 4, None, 4), (96, 3, None, 12),
        (7, 1, None, 7), (4096, 32, None, 32),
        (256, 2, 12, 4), (256, 2, 160, 16), (256, 1, 1, 1), (24, 8, 4, 1), (34, 1, None, 2),
    ],
)  # fmt: skip
def test_the_default(size, processes, most, chosen):
    parts = np.split(np.arange(size), processes) if size % processes == 0 else [np.arange(size)] * processes
    assert choose_shards(None, most, {size: parts}) == chosen


def test_processes_that_hold_the_same_rows_read_the_same_shards():
    halves = np.split(np.arange(64), 2)
    check_shards(16, None, 64, [halves[0], halves[0], halves[1], halves[1]], "train_data")


@pytest.mark.parametrize(
    ("num", "most", "processes", "words"),
    [
        (10, None, 1, "read as 10 shards, and batch_size is 48.*must divide batch_size. It can be 1, 2, 3, 4, 6, 8"),
        (16, 12, 1, "can be opened as at most 12.*Set data.shards to 1, 2, 3, 4, 6, 8 or 12"),
        (16, None, 3, r"on 3 processes.*Use 1, 2, 4, 8 or 16 processes.*data.shards to 1, 3, 6, 12, 24 or 48"),
    ],
)
def test_numbers_that_do_not_fit_are_rejected(num, most, processes, words):
    with pytest.raises(ConfigError, match=words):
        check_shards(num, most, 48, np.split(np.arange(48), processes), "train_data")


def test_one_shard_is_read_by_every_process():
    check_shards(1, 1, 48, np.split(np.arange(48), 3), "train_data")
