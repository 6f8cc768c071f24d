"""A position as JSON."""

import json

import numpy as np
import pytest

from spmdkit.data.stream_position import merge_positions, pack, unpack
from spmdkit.errors import CheckpointError, UserCodeError

STATES = [
    None,
    {"a": [1, 2.5, "x", True, None]},
    {"bytes": b"\x00\xff", "tuple": (1, (2,)), "infinite": float("-inf"), "big": 2**127},
    {1: "int keys", (2, 3): b""},
    {"\0bytes": "text with a tag"},
    np.random.default_rng(3).bit_generator.state,
]


@pytest.mark.parametrize("state", STATES)
def test_a_state_is_restored(state):
    assert unpack(json.loads(json.dumps(pack(state), allow_nan=False))) == state


def test_arrays_are_restored():
    for array in (np.arange(6, dtype=">i4").reshape(2, 3), np.zeros((0, 2), bool), np.array(1.5)):
        found = unpack(json.loads(json.dumps(pack({"x": array}))))["x"]
        assert found.dtype == array.dtype and found.shape == array.shape and found.flags.writeable
        np.testing.assert_array_equal(found, array)


def test_other_objects_are_rejected():
    with pytest.raises(UserCodeError, match=r"holds a builtins.set.*numbers, text, bytes"):
        pack({"x": {1}})


def test_processes_that_read_one_shard_must_agree():
    part = lambda given: {"num_shards": 2, "batch": 1, "shards": {"0": {"given": given}}}
    other = {"num_shards": 2, "batch": 1, "shards": {"1": {"given": 4}}}
    assert merge_positions([part(4), part(4), other])["shards"].keys() == {"0", "1"}
    with pytest.raises(CheckpointError, match=r"shard 0 of train_data differs between processes: 4 and 5"):
        merge_positions([part(4), part(5)])
